"""Builds what a release consists of, into dist/: sdist, wheel, Helm chart, notes, images and checksums.

    python scripts/release.py build [--images]   what `make release-dry-run` and .github/workflows/release.yml run
    python scripts/release.py set-version 0.2.0  write a version to every file that has it

The version is that of pyproject.toml. `PLACES` lists the other files that state it; a build checks them. The notes are
the version's section of CHANGELOG.md. Images are built by docker, or by buildah if no docker daemon runs. Nothing is
published: the workflow does that.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

DIST = Path("dist")
CHART = Path("deploy/helm/warmpath")
IMAGES = {"warmpath-gateway": "deploy/gateway.Dockerfile", "warmpath-engine": "deploy/engine.Dockerfile"}
NUMBER = r"(\d+\.\d+\.\d+(?:[-.]?(?:a|b|rc|dev)\d+)?)"
PLACES = {  # file -> patterns, each with the version as its group
    "pyproject.toml": (rf'^version = "{NUMBER}"$',),
    "gateway/__init__.py": (rf'^__version__ = "{NUMBER}"$',),
    "backend/__init__.py": (rf'^__version__ = "{NUMBER}"$',),
    "deploy/helm/warmpath/Chart.yaml": (rf"^version: {NUMBER}$", rf'^appVersion: "{NUMBER}"$'),
    "docker-compose.yml": (rf"image: warmpath-gateway:{NUMBER}$", rf"image: warmpath-engine:{NUMBER}$"),
}


def version() -> str:
    found = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    return str(found)


def stated_versions() -> dict[str, list[str]]:
    """The version that each file states."""
    return {
        name: [each for pattern in patterns for each in re.findall(pattern, Path(name).read_text(), re.MULTILINE)]
        for name, patterns in PLACES.items()
    }


def set_version(wanted: str) -> None:
    for name, patterns in PLACES.items():
        text = Path(name).read_text()
        for pattern in patterns:
            text = re.sub(pattern, lambda found: found[0].replace(found[1], wanted), text, flags=re.MULTILINE)
        Path(name).write_text(text)
    print(f"version {wanted} written; run `make manifests`, and add its section to CHANGELOG.md")


def notes(wanted: str) -> str:
    """The section of a version in CHANGELOG.md, without its heading."""
    sections = re.split(r"^## \[(.+?)\].*$", Path("CHANGELOG.md").read_text(), flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True)).get(wanted, "").strip()
    if not found:
        sys.exit(f"CHANGELOG.md has no section [{wanted}]")
    return found + "\n"


def check() -> None:
    wanted = version()
    for name, found in stated_versions().items():
        if len(found) != len(PLACES[name]) or set(found) != {wanted}:
            sys.exit(f"{name} states {found}, but pyproject.toml {wanted}; run scripts/release.py set-version {wanted}")


def build_packages() -> None:
    """The sdist, and the wheel from it, as users build it."""
    run(sys.executable, "-m", "build", "--outdir", str(DIST), ".")


def build_chart() -> None:
    import helm_python  # noqa: PLC0415 - takes 100 MB, and the other steps do without it

    report = helm_python.lint(CHART, {"secret": {"existingSecret": "none"}}, strict=True)
    if report["errors"]:
        sys.exit("\n".join(report["errors"]))
    print(helm_python.chart.package(CHART, destination=DIST, version=version(), app_version=version()))


def build_images() -> None:
    tool = image_tool()
    if tool is None:
        print("images: not built, because neither a docker daemon nor buildah is here")
        return
    command = ["git", "rev-parse", "HEAD"]
    revision = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    indexes = [name for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if os.environ.get(name)]
    for image, dockerfile in IMAGES.items():
        arguments = [
            f"VERSION={version()}",
            f"REVISION={revision}",
            *(f"{name}={os.environ[name]}" for name in indexes),
        ]
        options = [option for each in arguments for option in ("--build-arg", each)]
        run(*tool, "-f", dockerfile, "-t", f"{image}:{version()}", *options, ".")


def image_tool() -> list[str] | None:
    docker = shutil.which("docker")
    if docker is not None and subprocess.run([docker, "info"], capture_output=True).returncode == 0:
        return [docker, "build"]
    return [buildah, "build", "--isolation", "chroot"] if (buildah := shutil.which("buildah")) is not None else None


def write_checksums() -> None:
    files = sorted(path for path in DIST.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / "SHA256SUMS").write_text("".join(lines))
    for path, line in zip(files, lines, strict=True):
        print(f"{line.strip()}  {path.stat().st_size / 1e6:.1f} MB")


def run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build").add_argument("--images", action="store_true", help="build the images, too")
    verbs.add_parser("set-version").add_argument("version")
    options = parser.parse_args()
    if options.verb == "set-version":
        set_version(options.version)
        return
    check()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    (DIST / "notes.md").write_text(notes(version()))
    build_packages()
    build_chart()
    if options.images:
        build_images()
    write_checksums()


if __name__ == "__main__":
    main()
