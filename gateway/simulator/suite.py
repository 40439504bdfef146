"""Replays many workloads through all strategies, and flags the rows in which the gateway's own rule loses.

A row is flagged if the gateway's rule

    has a mean TTFT above `MEAN_LIMIT` times, or a p99 above `P99_LIMIT` times the best strategy's of this row,
    has a mean TTFT above round robin's,
    has a hit rate more than `HIT_RATE_LIMIT` below the pooled cache's, although another strategy has not,
    or loads one deployment more than `LOAD_LIMIT` times the mean.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from gateway.simulator.compare import OURS, POOLED, ROUND_ROBIN, StrategySummary, replay_strategy
from gateway.simulator.workloads import Workload

MEAN_LIMIT, P99_LIMIT, HIT_RATE_LIMIT, LOAD_LIMIT = 1.15, 1.3, 0.02, 1.5
NEGLIGIBLE_SECONDS = 0.01  # of TTFT: smaller differences are not flagged


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """The results of all strategies on one workload."""

    workload: str
    rho: float | None  # load, as a share of what the best possible rule could serve; None for recordings
    requests: int
    summaries: tuple[StrategySummary, ...]

    @property
    def best(self) -> StrategySummary | None:
        """The strategy with the least mean TTFT, except for the pooled cache, which is none."""
        real = [summary for summary in self.summaries if summary.strategy != POOLED]
        return min(real, key=lambda summary: summary.ttft_mean_seconds, default=None)

    @property
    def flags(self) -> tuple[str, ...]:
        """In what the gateway's rule loses. Empty if it was not replayed."""
        by_name = {summary.strategy: summary for summary in self.summaries}
        ours = by_name.get(OURS)
        others = [summary for summary in self.summaries if summary.strategy not in (OURS, POOLED)]
        return () if ours is None else tuple(_flags(ours, others, by_name.get(ROUND_ROBIN), by_name.get(POOLED)))


def _flags(
    ours: StrategySummary,
    others: Sequence[StrategySummary],
    round_robin: StrategySummary | None,
    pooled: StrategySummary | None,
) -> Iterator[str]:
    if others:
        mean = min(other.ttft_mean_seconds for other in others)
        if ours.ttft_mean_seconds > max(MEAN_LIMIT * mean, mean + NEGLIGIBLE_SECONDS):
            yield f"mean {ours.ttft_mean_seconds / mean:.2f} x best"
        p99 = min(other.ttft_p99_seconds for other in others)
        if ours.ttft_p99_seconds > max(P99_LIMIT * p99, p99 + NEGLIGIBLE_SECONDS):
            yield f"p99 {ours.ttft_p99_seconds / p99:.2f} x best"
    if round_robin is not None and ours.ttft_mean_seconds > round_robin.ttft_mean_seconds + NEGLIGIBLE_SECONDS:
        yield f"mean {ours.ttft_mean_seconds / round_robin.ttft_mean_seconds:.2f} x round robin"
    if pooled is not None:
        least = pooled.hit_rate - HIT_RATE_LIMIT
        if ours.hit_rate < least and any(other.hit_rate >= least for other in others):
            yield f"cached {100 * (ours.hit_rate - pooled.hit_rate):.1f} points"
    if ours.load_ratio > LOAD_LIMIT:
        yield f"busiest {ours.load_ratio:.2f} x mean"


def run_suite(workloads: Sequence[Workload], strategies: Sequence[str], *, processes: int = 1) -> Iterator[SuiteRow]:
    """Replay each workload through each strategy. Rows come in the order of the workloads, as they are complete."""
    tasks = [(workload, strategy) for workload in workloads for strategy in strategies]
    if processes == 1:
        yield from _rows(workloads, strategies, map(_replay, tasks))
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from _rows(workloads, strategies, pool.map(_replay, tasks))


def _replay(task: tuple[Workload, str]) -> StrategySummary:
    workload, strategy = task
    return replay_strategy(workload.trace, workload.site, strategy)


def _rows(
    workloads: Sequence[Workload], strategies: Sequence[str], summaries: Iterator[StrategySummary]
) -> Iterator[SuiteRow]:
    for workload in workloads:
        made = tuple(next(summaries) for _ in strategies)
        yield SuiteRow(workload.name, workload.rho, workload.trace.requests, made)
