"""How many threads a step uses on a CPU: measured, since cores and memory bandwidth may be shared.

Two things are measured: products of one row, which limit a decode of one sequence by reading weights that do not fit
into a cache, and products of 16 rows, which stand for larger batches and for prompts. More threads are used only if
they pay off, because each of them is a core that the server and its neighbours do not have. thread_tuner.py decides
when the number is measured again.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import torch

from backend.native.library import Library
from backend.ops.native import NativeOps

MEASURE_SECONDS = 0.1  # at the start at most, for all candidates together; each is measured twice in any case
PAUSE_SECONDS = 0.05  # the same while requests are running
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
    return _choose(native, _candidates(cores), MEASURE_SECONDS)


def choose_again(native: Library, cores: int, current: int) -> ThreadChoice:
    """As `choose_num_threads`, but quicker: between half and twice the current number of threads."""
    candidates = _candidates(cores)
    near = [count for count in candidates if current <= 2 * count and count <= 2 * current]
    return _choose(native, near or candidates[-1:], PAUSE_SECONDS)


def decide(seconds: Seconds) -> ThreadChoice:
    """The number of threads that these measurements speak for: a larger one only if it pays off."""
    chosen, *larger = sorted(seconds)
    for candidate in larger:
        speedups = _speedups(seconds, chosen, candidate)
        if max(speedups) >= MIN_SPEEDUP and min(speedups) * MAX_SLOWDOWN >= 1.0:
            chosen = candidate
    # The choice is compared with the fewest threads, or these with the most threads.
    fewest, most = min(seconds), max(seconds)
    compared = chosen if chosen > fewest else most
    decode, batch = _speedups(seconds, fewest, compared)
    reason = f"with {compared}, decode has {decode:.2f} times and batches have {batch:.2f} times the speed of {fewest}"
    return ThreadChoice(chosen, reason)


def _choose(native: Library, candidates: list[int], budget_seconds: float) -> ThreadChoice:
    if len(candidates) == 1:
        count = candidates[0]
        return ThreadChoice(count, "this process may use one core" if count == 1 else f"{count} cores are left")
    return decide(_measure(native, candidates, budget_seconds))


def _candidates(cores: int) -> list[int]:
    return [*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores), cores]


def _speedups(seconds: Seconds, one: int, other: int) -> tuple[float, ...]:
    return tuple(before / after for before, after in zip(seconds[one], seconds[other], strict=True))


def _measure(native: Library, candidates: list[int], budget_seconds: float) -> Seconds:
    """The median time of one pass over all weights, by number of threads and rows.

    The candidates take turns, so that all of them see the same load from other processes.
    """
    inputs = [torch.ones(rows, IN_FEATURES, dtype=torch.bfloat16) for rows in ROWS]
    ops_by_candidate = {candidate: NativeOps(native, num_threads=candidate) for candidate in candidates}
    # Packed as a model's weights: torch would multiply other weights by 16 rows, with its own number of threads.
    weight = torch.ones(OUT_FEATURES, IN_FEATURES, dtype=torch.bfloat16)
    packed = ops_by_candidate[candidates[0]].pack(weight, weight.dtype)
    weights = [packed, *(packed.clone() for _ in range(NUM_WEIGHTS - 1))]
    times: dict[int, list[list[float]]] = {candidate: [[] for _ in ROWS] for candidate in candidates}
    end = time.monotonic() + budget_seconds
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
