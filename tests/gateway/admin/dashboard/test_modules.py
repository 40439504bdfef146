"""The dashboard's modules that do not need a page, tested in node by `*.test.mjs` beside this file."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent.relative_to(ROOT)
SECONDS_MAX = 60


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of modules and tests in a folder whose package.json declares ES modules.

    Browsers do not need that, and versions of node differ in their default.
    """
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "package.json").write_text('{"type": "module"}')
    shutil.copytree(ROOT / "gateway" / "admin" / "dashboard", folder / "gateway" / "admin" / "dashboard")
    shutil.copytree(ROOT / HERE, folder / HERE, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def node(copy: Path, *arguments: str, given: bytes = b"") -> str:
    ran = subprocess.run(["node", *arguments], cwd=copy / HERE, input=given, capture_output=True, timeout=SECONDS_MAX)
    assert ran.returncode == 0, ran.stdout.decode() + ran.stderr.decode()
    return ran.stdout.decode()


@pytest.mark.parametrize("file", sorted(path.name for path in Path(__file__).parent.glob("*.test.mjs")))
def test_modules(copy: Path, file: str) -> None:
    assert "# pass 0" not in node(copy, "--test", "--test-reporter=tap", file)


def test_every_module_is_valid_javascript(copy: Path) -> None:
    files = [str(path) for path in (copy / "gateway" / "admin" / "dashboard").rglob("*.js")]
    assert len(files) > 10
    for file in files:
        node(copy, "--check", file)


def test_prometheus_text_is_parsed_like_by_prometheus_client(copy: Path) -> None:
    registry = CollectorRegistry()
    counter = Counter("calls", "Calls.", ["model", "tenant"], registry=registry)
    for name in ("plain", 'quo"te', "back\\slash", "new\nline", "brace}", "{", 'a="b",c', "<b>m</b>", "é 漢", ""):
        counter.labels(name, name[::-1]).inc(3.5)
    seconds = Histogram("seconds", "Seconds.", ["class"], buckets=(0.005, 1, 60), registry=registry)
    for value in (0.001, 0.5, 1e9):
        seconds.labels("real time").observe(value)
    Gauge("much", "Much.", registry=registry).set(float("inf"))
    Gauge("unknown", "Unknown.", registry=registry).set(float("nan"))
    text = generate_latest(registry)

    expected = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    ]
    found = [
        (name, labels, float(value.replace("Infinity", "inf")))
        for name, labels, value in json.loads(node(copy, "read.mjs", given=text))
    ]
    key = repr  # nan is not equal to itself, but is written alike
    assert sorted(map(key, found)) == sorted(map(key, expected))
