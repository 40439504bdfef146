"""The threads that share an operation, and the cores that they run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backend.native import library

if library.load() is None:
    pytest.skip("there is no compiler here", allow_module_level=True)

ON_ONE_CORE = """
import os, torch
from backend.ops.native import NativeOps

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # also for the threads that this one starts
cpu_ns = lambda thread: int(open(f"/proc/self/task/{thread}/schedstat").read().split()[0])
x, weight = torch.ones(1, 1024), torch.ones(8192, 1024)
alone, shared = NativeOps(num_threads=1), NativeOps(num_threads=2)
expected = alone.linear(x, weight, None)
before = {*os.listdir("/proc/self/task")}
shared.linear(x, weight, None)
(helper,) = {*os.listdir("/proc/self/task")} - before
began = cpu_ns(helper), cpu_ns(os.getpid())
for _ in range(200):
    assert torch.equal(shared.linear(x, weight, None), expected)
print((cpu_ns(helper) - began[0]) / (cpu_ns(os.getpid()) - began[1]))
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs the CPU times of threads, from Linux")
def test_a_helper_does_not_compete_for_the_callers_core() -> None:
    """It would take the core from the caller, for work that the caller can do itself."""
    done = subprocess.run([sys.executable, "-c", ON_ONE_CORE], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.2
