"""Replays many workloads through all strategies, and flags the rows in which the gateway's own rule loses.

A row is flagged if the gateway's rule

    has a mean TTFT above `MEAN_LIMIT` times, or a p99 above `P99_LIMIT` times the best strategy's of this row,
    has a mean TTFT or a p99 above round robin's,
    has a hit rate more than `HIT_RATE_LIMIT` below the pooled cache's, although the best other strategy has not,
    or loads one deployment more than `LOAD_LIMIT` times the mean.

The best other strategy is the one with the least mean TTFT. If even that one misses what a pooled cache has, the row's
hit rate is not a matter of routing.

Batch requests may be held, so that all of them end sooner: if a row has no others, its makespan takes the place of the
mean TTFT, its p99 is not judged, and its hit rate must be `BATCH_HIT_RATE`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from gateway.simulator.compare import OURS, POOLED, ROUND_ROBIN, StrategySummary, replay_strategy
from gateway.simulator.workloads import Workload

MEAN_LIMIT, P99_LIMIT, HIT_RATE_LIMIT, LOAD_LIMIT = 1.15, 1.3, 0.02, 1.5
BATCH_HIT_RATE = 0.9
NEGLIGIBLE_SECONDS = 0.01  # of TTFT: smaller differences are not flagged


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """The results of all strategies on one workload."""

    workload: str
    rho: float  # load, as a share of what the best possible rule could serve
    requests: int
    is_batch: bool  # no request is real-time
    summaries: tuple[StrategySummary, ...]

    @property
    def best(self) -> StrategySummary | None:
        """The strategy with the least mean TTFT or makespan. The pooled cache is a bound and not a strategy."""
        real = [summary for summary in self.summaries if summary.strategy != POOLED]
        return min(real, key=self._seconds, default=None)

    def _seconds(self, summary: StrategySummary) -> float:
        return summary.makespan_seconds if self.is_batch else summary.ttft_mean_seconds

    @property
    def flags(self) -> tuple[str, ...]:
        """In what the gateway's rule loses. Empty if it was not replayed."""
        by_name = {summary.strategy: summary for summary in self.summaries}
        others = [summary for summary in self.summaries if summary.strategy not in (OURS, POOLED)]
        return tuple(self._flags(by_name, others)) if OURS in by_name else ()

    def _flags(self, by_name: dict[str, StrategySummary], others: Sequence[StrategySummary]) -> Iterator[str]:
        ours, what = by_name[OURS], "makespan" if self.is_batch else "mean"
        seconds, best = self._seconds(ours), min(others, key=self._seconds, default=None)
        if best is not None and _exceeds(seconds, self._seconds(best), MEAN_LIMIT):
            yield f"{what} {seconds / self._seconds(best):.2f} x best"
        if others and not self.is_batch:
            p99 = min(other.ttft_p99_seconds for other in others)
            if _exceeds(ours.ttft_p99_seconds, p99, P99_LIMIT):
                yield f"p99 {ours.ttft_p99_seconds / p99:.2f} x best"
        if (base := by_name.get(ROUND_ROBIN)) is not None:
            if _exceeds(seconds, self._seconds(base), 1.0):
                yield f"{what} {seconds / self._seconds(base):.2f} x round robin"
            if not self.is_batch and _exceeds(ours.ttft_p99_seconds, base.ttft_p99_seconds, 1.0):
                yield f"p99 {ours.ttft_p99_seconds / base.ttft_p99_seconds:.2f} x round robin"
        if self.is_batch and ours.hit_rate < BATCH_HIT_RATE:
            yield f"cached {ours.hit_rate:.3f}"
        if POOLED in by_name and best is not None:
            least = by_name[POOLED].hit_rate - HIT_RATE_LIMIT
            if ours.hit_rate < least <= best.hit_rate:
                yield f"cached {100 * (ours.hit_rate - by_name[POOLED].hit_rate):.1f} points"
        if ours.load_ratio > LOAD_LIMIT:
            yield f"busiest {ours.load_ratio:.2f} x mean"


def _exceeds(seconds: float, other: float, limit: float) -> bool:
    return seconds > max(limit * other, other + NEGLIGIBLE_SECONDS)


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
        is_batch = not any(session.urgent for session in workload.trace.sessions)
        yield SuiteRow(workload.name, workload.rho, workload.trace.requests, is_batch, made)
