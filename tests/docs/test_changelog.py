import re
import tomllib

import yaml

from gateway import __version__
from tests.docs.markdown import ROOT

VERSIONS = re.findall(
    r"^## \[(\d+\.\d+\.\d+)\] - (Unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
)


def test_the_newest_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert VERSIONS[0][0] == project["version"] == __version__


def test_the_images_carry_it() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ours = [service["image"] for service in services.values() if "build" in service]
    assert ours == [f"warmpath-gateway:{__version__}", f"warmpath-engine:{__version__}"]


def test_versions_fall_and_only_the_newest_may_be_unreleased() -> None:
    versions = [tuple(map(int, version.split("."))) for version, _ in VERSIONS]
    assert versions == sorted(versions, reverse=True)
    assert all(date != "Unreleased" for _, date in VERSIONS[1:])
