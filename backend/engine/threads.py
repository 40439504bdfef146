"""How many threads a step uses on a CPU: measured at the start, since cores and memory bandwidth may be shared.

The measurement runs what limits a decode: products of one row with weights that do not fit into a cache. More threads
are used only if they pay off, because each of them is a core that the server and its neighbours do not have.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

from backend.native.library import Library
from backend.ops.native import NativeOps

MEASURE_SECONDS = 0.5  # at most, for all candidates together, except that each is measured once in any case
ROUNDS = 9
IN_FEATURES, OUT_FEATURES, NUM_WEIGHTS = 1024, 4096, 6  # 8 MiB each: together more than one core's cache
MIN_SPEEDUP = 1.15  # of a larger number of threads over the smaller one before it


def num_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_num_threads(native: Library | None, cores: int) -> int:
    """At least 1, at most `cores`.

    Without the native kernels nothing is measured. Torch's threads wait for each other, so on two cores one is left to
    the server.
    """
    if native is None:
        return 1 if cores <= 2 else cores
    candidates = [*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores), cores]
    seconds = _measure(native, candidates)
    chosen = candidates[0]
    for candidate in candidates[1:]:
        if seconds[candidate] * MIN_SPEEDUP <= seconds[chosen]:
            chosen = candidate
    return chosen


def _measure(native: Library, candidates: list[int]) -> dict[int, float]:
    """The median time of one pass over all weights, by number of threads.

    The candidates take turns, so that all of them see the same load from other processes.
    """
    x = torch.ones(1, IN_FEATURES, dtype=torch.bfloat16)
    weights = [torch.ones(OUT_FEATURES, IN_FEATURES, dtype=torch.bfloat16) for _ in range(NUM_WEIGHTS)]
    ops_by_candidate = {candidate: NativeOps(native, num_threads=candidate) for candidate in candidates}
    times: dict[int, list[float]] = {candidate: [] for candidate in candidates}
    end = time.monotonic() + MEASURE_SECONDS
    for round_number in range(ROUNDS):
        for candidate, ops in ops_by_candidate.items():
            started = time.perf_counter()
            for weight in weights:
                ops.linear(x, weight, None)
            times[candidate].append(time.perf_counter() - started)
        if round_number and time.monotonic() > end:
            break
    return {candidate: statistics.median(taken) for candidate, taken in times.items()}
