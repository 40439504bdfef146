"""The chaos benchmark for half a minute: all its faults, each at least once, and all its checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT, clean_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=60)]

RUN_SECONDS_MAX = 500  # with the start of three engines and the end of all leases, on a busy machine


def test_nobody_pays_for_anothers_fault(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "0.5", "--clients", "6", "--keep", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=RUN_SECONDS_MAX
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "innocent calls refused: 0" in done.stdout
