"""The static site of the documentation builds without a warning, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs import site
from tests.docs.markdown import ROOT

needs_zensical = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="the extra `docs` is not installed: pip install -e '.[docs]'"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    site.build(folder)
    return folder


def test_every_page_is_in_the_navigation() -> None:
    assert set((ROOT / "docs").rglob("*.md")) <= set(site.pages())


@needs_zensical
def test_every_page_is_built(built: Path) -> None:
    pages = [page.relative_to(ROOT) for page in site.pages()]
    names = [str(page.with_name("index.md") if page.name == "README.md" else page) for page in pages]
    assert [name for name in names if not (built / "site" / name).with_suffix(".html").is_file()] == []


@needs_zensical
def test_nothing_is_loaded_from_elsewhere(built: Path) -> None:
    loaded = {url for page in (built / "site").rglob("*.html") for url in loads(page)}
    assert any(url.endswith(".css") for url in loaded)
    assert {url for url in loaded if "//" in url} == set()
    sheets = [sheet.read_text() for sheet in (built / "site").rglob("*.css")]
    assert not any("url(http" in sheet or "@import" in sheet for sheet in sheets)


@needs_zensical
@pytest.mark.parametrize("link", ["[gone](gone.md)", "[gone](reference/cli.md#gone)"])
def test_a_broken_link_is_an_error(built: Path, link: str, capfd: pytest.CaptureFixture[str]) -> None:
    page = built / "source" / "docs" / "index.md"
    whole = page.read_text()
    try:
        page.write_text(f"{whole}\n{link}\n")
        with pytest.raises(subprocess.CalledProcessError):
            site.render(built)
    finally:
        page.write_text(whole)
    assert "does not exist" in capfd.readouterr().err


def loads(page: Path) -> Iterator[str]:
    """The addresses that a browser fetches by itself when it shows a page."""
    found: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            found.append(given.get("src") or "")
            found.append(given.get("srcset") or "")
            if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
                found.append(given.get("href") or "")

    Parser().feed(page.read_text())
    yield from filter(None, found)
