"""Runs the GPU benchmark from end to end with tiny shapes on a CPU, since few machines have a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = (sys.executable, "-m", "benchmarks.engine.gpu")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_rehearsal_on_a_cpu_completes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = (*SCRIPT, "--rehearse", "--rounds", "1", "--shapes", "llama-3-8b", "--result", str(result))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    written = json.loads(result.read_text())
    assert "rehearsal" in written["machine"]
    figures = written["figures"]["llama-3-8b"]
    names = {
        "read",
        "gemm",
        "one",
        "many",
        "plain",
        "filtered",
        "penalised",
        "scored",
        "masked",
        "ttft",
        "warm",
        "start",
        "peer",
    }
    assert set(figures["best"]) == names
    assert all(value > 0 for value in figures["best"].values())
    goals = {row["what"]: row["goal"] for row in figures["judged"]}
    assert goals["one sequence"] == ">= 0.80"
    assert goals["6 requests"] == ">= 5.00"
    for what in goals:
        assert what in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, on which the benchmark takes minutes")
def test_without_a_gpu_it_exits_with_an_error() -> None:
    done = subprocess.run(SCRIPT, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
