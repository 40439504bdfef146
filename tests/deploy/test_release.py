"""The script that builds releases, and the workflow that runs it."""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from scripts import release

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_file_states_the_version_of_pyproject() -> None:
    release.check()
    assert release.notes(release.version()).startswith("### Added")
    with pytest.raises(SystemExit, match=r"no section \[99.0.0\]"):
        release.notes("99.0.0")


def test_a_version_is_set_in_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in release.PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    release.set_version("9.8.7")
    release.check()
    assert release.version() == "9.8.7"
    assert {number for found in release.stated_versions().values() for number in found} == {"9.8.7"}
    Path("gateway/__init__.py").write_text('__version__ = "9.8.6"\n')
    with pytest.raises(SystemExit, match=r"gateway/__init__\.py states"):
        release.check()


def test_the_chart_is_packaged_with_the_alert_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "DIST", tmp_path)
    release.build_chart()
    release.write_checksums()
    (archive,) = tmp_path.glob("warmpath-*.tgz")
    assert archive.name in (tmp_path / "SHA256SUMS").read_text()
    with tarfile.open(archive) as chart:
        names = {member.name for member in chart if member.isfile()}
        packed = chart.extractfile("warmpath/alerts.yml")
        assert packed is not None
        assert packed.read() == (ROOT / "deploy" / "prometheus" / "alerts.yml").read_bytes()
    assert {"warmpath/Chart.yaml", "warmpath/values.schema.json", "warmpath/templates/gateway.yaml"} <= names


def test_the_workflow_runs_what_the_makefile_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    used = set(re.findall(r"\bmake ([\w-]+)", "\n".join(commands)))
    assert {"test-all", "release"} <= used <= targets
    for part in ("gateway", "engine"):
        assert (ROOT / "deploy" / f"{part}.Dockerfile").exists()
    assert all(job in workflow["jobs"] for each in workflow["jobs"].values() if (job := each.get("needs")))
