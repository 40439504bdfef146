"""Replays one trace through several strategies and sums up the results."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from gateway.routing.base import Strategy
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.round_robin import RoundRobin
from gateway.simulator import baselines
from gateway.simulator.replay import Replay, ReplayedRequest, ReplayResult
from gateway.simulator.site import Reports, SimulatedSite
from gateway.simulator.traces import TrafficTrace

OURS, ROUND_ROBIN, POOLED = "warmpath", "round robin", "pooled cache (bound)"
STRATEGIES: dict[str, Callable[[baselines.ActualEngine], Strategy]] = {
    OURS: lambda _: PrefixAffinity(),
    ROUND_ROBIN: lambda _: RoundRobin(),
    "least busy": lambda _: baselines.FewestCalls(),
    "consistent hash": lambda _: baselines.ConsistentHash(),
    "sglang-router": lambda _: baselines.CacheAware(baselines.SGLANG_TREE_CHARACTERS),
    "vllm-router": lambda _: baselines.CacheAware(baselines.VLLM_TREE_CHARACTERS),
    "llm-d scorers": baselines.WeightedScorers,
    "llm-d affinity": baselines.AffinityFilter,
    "dynamo": baselines.DynamoCost,
    "production-stack": baselines.LongestPrefix,
    POOLED: baselines.ShortestQueue,
}
REQUESTS_PER_PROCESS = 10_000  # take a few seconds; for fewer, another process does not pay


@dataclass(frozen=True, slots=True)
class StrategySummary:
    """The figures of one strategy. Times are seconds of virtual time.

    TTFT counts from a request's arrival, including the time for which it was held. `held_p99_seconds` is over all
    requests; `urgent_held` counts held real-time requests, which should be 0. `urgent` figures are None unless the
    trace has both real-time and batch requests.
    """

    strategy: str
    requests: int
    hit_rate: float  # share of prompt tokens that were cached
    urgent_hit_rate: float | None
    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    urgent_ttft_p99_seconds: float | None
    urgent_held: int
    held_p99_seconds: float
    makespan_seconds: float
    load_ratio: float  # time that the busiest engine computed, divided by the mean
    predicted_ratio: float | None  # predicted cached tokens / real ones; None for strategies that do not predict


def compare(
    trace: TrafficTrace, site: SimulatedSite, names: Sequence[str], *, hints: bool = False, processes: int = 1
) -> Iterator[StrategySummary]:
    """Replay the trace through each named strategy, in this order.

    Only the gateway's own strategy holds calls. The pooled one has a single cache of the total capacity. If there is
    much to replay, up to `processes` processes share the strategies.
    """
    replayed = partial(replay_strategy, trace, site, hints=hints)
    processes = min(processes, len(names), 1 + trace.requests * len(names) // REQUESTS_PER_PROCESS)
    if processes == 1:
        yield from map(replayed, names)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(replayed, names)


def replay_strategy(trace: TrafficTrace, site: SimulatedSite, name: str, *, hints: bool = False) -> StrategySummary:
    """Replay the trace through one strategy of `STRATEGIES`."""
    if name != OURS:  # the others have no use for reports: they see the engines themselves, or nothing
        site = replace(site, reports=Reports.NOTHING)
    replay = Replay(trace, site, STRATEGIES[name], holds=name == OURS, hints=hints, pooled=name == POOLED)
    return _summary(name, replay.run(), predicts=name == OURS)


def prefill_rate_for_load(trace: TrafficTrace, deployments: int, load: float) -> float:
    """The prefill rate per engine, in tokens per second, at which the trace without any cache hit causes this load."""
    return trace.prompt_tokens / max(trace.duration_seconds, 1e-9) / deployments / load


def _summary(name: str, result: ReplayResult, *, predicts: bool) -> StrategySummary:
    requests = result.requests
    ttfts = sorted(request.first_chunk - request.arrived for request in requests)
    holds = sorted(request.sent - request.arrived for request in requests)
    urgent = [request for request in requests if request.urgent]
    some_are_batch = 0 < len(urgent) < len(requests)
    busy_seconds = [engine.work_seconds for engine in result.engines]
    cached = sum(request.cached_tokens for request in requests)
    return StrategySummary(
        strategy=name,
        requests=len(requests),
        hit_rate=_hit_rate(requests),
        urgent_hit_rate=_hit_rate(urgent) if some_are_batch else None,
        ttft_mean_seconds=fmean(ttfts),
        ttft_p50_seconds=_quantile(ttfts, 0.5),
        ttft_p99_seconds=_quantile(ttfts, 0.99),
        urgent_ttft_p99_seconds=(
            _quantile(sorted(request.first_chunk - request.arrived for request in urgent), 0.99)
            if some_are_batch
            else None
        ),
        urgent_held=sum(request.sent > request.arrived for request in urgent),
        held_p99_seconds=_quantile(holds, 0.99),
        makespan_seconds=max(request.finished for request in requests),
        load_ratio=max(busy_seconds) / fmean(busy_seconds) if any(busy_seconds) else 1.0,
        predicted_ratio=sum(request.predicted_tokens for request in requests) / cached if predicts and cached else None,
    )


def _hit_rate(requests: Sequence[ReplayedRequest]) -> float:
    return sum(request.cached_tokens for request in requests) / sum(request.prompt_tokens for request in requests)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
