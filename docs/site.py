"""The documentation as a static site: `make docs-site`, or `python -m docs.site [FOLDER]`.

Pages link to each other and to other files of the repository by relative paths. `build` copies every page that
`docs/zensical.toml` names, and every file that one of them links to, into a folder with the paths that they have in the
repository, and has Zensical build the site from that copy. So a link that works on a checkout works on the site, and
strict mode, in which a broken link or anchor ends the build, checks all of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "docs" / "zensical.toml"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)|(?:src|srcset|href)=\"([^\"#:]+)\"")


def pages() -> list[Path]:
    """The pages in the order of the navigation."""
    return [ROOT / name for name in _names(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"])]


def _names(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav:
        for value in entry.values():
            yield from _names(value)


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to or shows."""
    for target in LINK.finditer(page.read_text(encoding="utf-8")):
        path = (page.parent / (target[1] or target[2])).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path


def build(folder: Path) -> Path:
    """Build the site under `folder` and return the folder of its home page. Raises CalledProcessError on a warning."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {file for page in pages() for file in (page, *linked(page))}
    for file in files:
        copy = folder / "source" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    shutil.copyfile(CONFIG, folder / CONFIG.name)
    render(folder)
    return folder / "site"


def render(folder: Path) -> None:
    """Run Zensical on a folder that `build` has filled. Raises CalledProcessError on a warning."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(folder / CONFIG.name)]
    subprocess.run(command, check=True, cwd=folder)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs").resolve()
    try:
        site = build(folder)
    except subprocess.CalledProcessError:
        sys.exit("The site has warnings: see above.")
    print(f"Site: {site / 'index.html'}\nTo search it, serve it: python -m http.server --directory {site}")


if __name__ == "__main__":
    main()
