"""A burst of streams with limits far from reached, on memory, SQLite and Redis: no stream is rejected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=10)]

ROOT = Path(__file__).parents[2]


def test_no_stream_of_a_burst_is_rejected(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = ["-m", "benchmarks.gateway.burst", "--streams", "300", "--rounds", "1", "--out", str(out)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert {name: each["failed"] for name, each in result["storages"].items()} == {"memory": 0, "sqlite": 0, "redis": 0}
