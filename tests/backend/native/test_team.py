"""The threads that take shares of an operation, where the system runs them."""

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

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # and of the threads that this one starts
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


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="threads' times are Linux's")
def test_a_helper_leaves_the_callers_core_to_the_caller() -> None:
    """Whose turn it would take, only to wait for work that the caller could do instead."""
    done = subprocess.run([sys.executable, "-c", ON_ONE_CORE], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.2
