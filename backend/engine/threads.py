"""How many threads a step should have: measured at the start, since cores may be shared, and memory always is.

What is measured is what bounds a decode: products of one row with weights that no cache holds. More threads are taken
only if they pay, since each of them is a core that the server and its neighbours do not have.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

from backend.native.library import Library
from backend.ops.native import NativeOps

MEASURE_SECONDS = 0.5  # at most, for all candidates together, but for one look at each
ROUNDS = 9
INS, OUTS, WEIGHTS = 1024, 4096, 6  # 8 MiB each, and more than a cache of one core together
WORTH = 1.15  # how much faster a larger number must be than the one before it


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_num_threads(native: Library | None, cores: int) -> int:
    """At least 1, at most `cores`. Without the kernels nothing is measured: torch's threads wait for each other, so
    that of two cores one is left to the server."""
    if native is None:
        return 1 if cores <= 2 else cores
    candidates = [*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores), cores]
    seconds = _measure(native, candidates)
    chosen = candidates[0]
    for candidate in candidates[1:]:
        if seconds[candidate] * WORTH <= seconds[chosen]:
            chosen = candidate
    return chosen


def _measure(native: Library, candidates: list[int]) -> dict[int, float]:
    """The median time of one pass over all weights, by the number of threads; in turns, so that all see the same
    neighbours."""
    x = torch.ones(1, INS, dtype=torch.bfloat16)
    weights = [torch.ones(OUTS, INS, dtype=torch.bfloat16) for _ in range(WEIGHTS)]
    ops = {candidate: NativeOps(native, num_threads=candidate) for candidate in candidates}
    times: dict[int, list[float]] = {candidate: [] for candidate in candidates}
    end = time.monotonic() + MEASURE_SECONDS
    for done in range(ROUNDS):
        for candidate, computing in ops.items():
            started = time.perf_counter()
            for weight in weights:
                computing.linear(x, weight, None)
            times[candidate].append(time.perf_counter() - started)
        if done and time.monotonic() > end:
            break
    return {candidate: statistics.median(taken) for candidate, taken in times.items()}
