"""How many threads a step uses on a CPU: measured at the start, since cores and memory bandwidth may be shared.

Two things are measured: products of one row, which limit a decode of one sequence by reading weights that do not fit
into a cache, and products of 16 rows, which stand for larger batches and for prompts. More threads are used only if
they pay off, because each of them is a core that the server and its neighbours do not have.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import torch

from backend.native.library import Library
from backend.ops.native import NativeOps

MEASURE_SECONDS = 0.5  # at most, for all candidates together, except that each is measured once in any case
ROUNDS = 9
ROWS = (1, 16)  # decode of one sequence; larger batches
IN_FEATURES, OUT_FEATURES, NUM_WEIGHTS = 1024, 4096, 6  # 8 MiB each: together more than one core's cache
MIN_SPEEDUP = 1.15  # of a larger number of threads over the smaller one before it, for either of the products
MAX_SLOWDOWN = 1.05  # of the other product

Seconds = dict[int, tuple[float, ...]]  # by number of threads: one pass over all weights, for each of ROWS


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads, and why it was chosen."""

    count: int
    reason: str


def num_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_num_threads(native: Library | None, cores: int) -> ThreadChoice:
    """At least 1, at most `cores`.

    Without the native kernels nothing is measured. Torch's threads wait for each other, so on two cores one is left to
    the server.
    """
    if native is None:
        count = 1 if cores <= 2 else cores
        return ThreadChoice(count, f"torch computes, on {cores} cores" if count > 1 else "one core is for the server")
    candidates = [*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores), cores]
    if len(candidates) == 1:
        return ThreadChoice(1, "this process may use one core")
    seconds = _measure(native, candidates)
    chosen = candidates[0]
    for candidate in candidates[1:]:
        speedups = [before / after for before, after in zip(seconds[chosen], seconds[candidate], strict=True)]
        if max(speedups) >= MIN_SPEEDUP and min(speedups) * MAX_SLOWDOWN >= 1.0:
            chosen = candidate
    return ThreadChoice(chosen, _reason(seconds, chosen))


def _reason(seconds: Seconds, chosen: int) -> str:
    """Compares the choice with one thread, or one thread with the most threads that were measured."""
    compared = chosen if chosen > 1 else max(seconds)
    decode, batch = (before / after for before, after in zip(seconds[1], seconds[compared], strict=True))
    return f"with {compared}, decode has {decode:.2f} times and batches have {batch:.2f} times one thread's speed"


def _measure(native: Library, candidates: list[int]) -> Seconds:
    """The median time of one pass over all weights, by number of threads and rows.

    The candidates take turns, so that all of them see the same load from other processes.
    """
    inputs = [torch.ones(rows, IN_FEATURES, dtype=torch.bfloat16) for rows in ROWS]
    weights = [torch.ones(OUT_FEATURES, IN_FEATURES, dtype=torch.bfloat16) for _ in range(NUM_WEIGHTS)]
    ops_by_candidate = {candidate: NativeOps(native, num_threads=candidate) for candidate in candidates}
    times: dict[int, list[list[float]]] = {candidate: [[] for _ in ROWS] for candidate in candidates}
    end = time.monotonic() + MEASURE_SECONDS
    for round_number in range(ROUNDS):
        for candidate, ops in ops_by_candidate.items():
            for x, taken in zip(inputs, times[candidate], strict=True):
                started = time.perf_counter()
                for weight in weights:
                    ops.linear(x, weight, None)
                taken.append(time.perf_counter() - started)
        if round_number and time.monotonic() > end:
            break
    return {candidate: tuple(map(statistics.median, taken)) for candidate, taken in times.items()}
