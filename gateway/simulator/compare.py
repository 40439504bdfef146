"""One trace through several strategies, beside each other, and what came of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from gateway.policy import Policy
from gateway.routing.base import Strategy
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.round_robin import RoundRobin
from gateway.simulator import baselines
from gateway.simulator.replay import Replay, ReplayedRequest, ReplayResult, SimulatedSite
from gateway.simulator.traces import TrafficTrace

OURS, POOLED = "warmpath", "pooled cache (bound)"
STRATEGIES: dict[str, Callable[[baselines.ActualCache], Strategy]] = {
    OURS: lambda _: PrefixAffinity(),
    "round robin": lambda _: RoundRobin(),
    "least busy": lambda _: baselines.FewestCalls(),
    "consistent hash": lambda _: baselines.ConsistentHash(),
    "sglang's rule": lambda _: baselines.SGLangRule(),
    "dynamo's cost": baselines.DynamoCost,
    POOLED: lambda _: baselines.ShortestQueue(),
}
REQUESTS_PER_PROCESS = 10_000  # which take a few seconds: for less, starting one more does not pay


@dataclass(frozen=True, slots=True)
class StrategySummary:
    """Of one strategy. Seconds are virtual. TTFT counts from a request's arrival, being held included; what was held
    is counted for batch, and for real-time (`urgent`), which never should be."""

    strategy: str
    requests: int
    hit_rate: float  # share of prompt tokens
    urgent_hit_rate: float | None
    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    urgent_ttft_p99_seconds: float | None
    urgent_held: int
    held_p99_seconds: float
    makespan_seconds: float
    load_ratio: float  # of the server that was busiest with prefilling, to the mean
    predicted_ratio: float | None  # predicted to really cached tokens; of routers that predict


def policy_for(policy: Policy, deployments: int) -> Policy:
    """The policy with so many copies of its first deployment, and with its first model there alone."""
    document = policy.model_dump(by_alias=True)
    copies = [{**document["deployments"][0], "name": f"s{number}"} for number in range(deployments)]
    model = {**document["models"][0], "deployments": [copy["name"] for copy in copies], "fallbacks": []}
    return Policy.model_validate({**document, "deployments": copies, "models": [model], "rules": ()})


def compare(
    trace: TrafficTrace, site: SimulatedSite, names: Sequence[str], *, hints: bool = False, processes: int = 1
) -> Iterator[StrategySummary]:
    """Replay the trace through each of the strategies named, in their order. Only ours holds calls back; the pooled
    one has a single cache of the size of all. Where there is much to replay, so many `processes` share the strategies.
    """
    replayed = partial(_replayed, trace, site, hints)
    processes = min(processes, len(names), 1 + trace.requests * len(names) // REQUESTS_PER_PROCESS)
    if processes == 1:
        yield from map(replayed, names)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(replayed, names)


def _replayed(trace: TrafficTrace, site: SimulatedSite, hints: bool, name: str) -> StrategySummary:
    replay = Replay(trace, site, STRATEGIES[name], holds=name == OURS, hints=hints, pooled=name == POOLED)
    return _summary(name, replay.run(), predicts=name == OURS)


def prefill_rate_for_load(trace: TrafficTrace, deployments: int, load: float) -> float:
    """Tokens per second of each server at which the trace, all of it computed, keeps them busy for that share."""
    return trace.prompt_tokens / max(trace.duration_seconds, 1e-9) / deployments / load


def _summary(name: str, outcome: ReplayResult, *, predicts: bool) -> StrategySummary:
    served = outcome.served
    waits = sorted(one.first_chunk - one.came for one in served)
    holds = sorted(one.sent - one.came for one in served)
    urgent = [one for one in served if one.urgent]
    some_are_batch = 0 < len(urgent) < len(served)
    busy = [deployment.busy_seconds for deployment in outcome.deployments]
    cached = sum(one.cached_tokens for one in served)
    return StrategySummary(
        strategy=name,
        requests=len(served),
        hit_rate=_hit_rate(served),
        urgent_hit_rate=_hit_rate(urgent) if some_are_batch else None,
        ttft_mean_seconds=fmean(waits),
        ttft_p50_seconds=_quantile(waits, 0.5),
        ttft_p99_seconds=_quantile(waits, 0.99),
        urgent_ttft_p99_seconds=(
            _quantile(sorted(one.first_chunk - one.came for one in urgent), 0.99) if some_are_batch else None
        ),
        urgent_held=sum(one.sent > one.came for one in urgent),
        held_p99_seconds=_quantile(holds, 0.99),
        makespan_seconds=max(one.finished for one in served),
        load_ratio=max(busy) / fmean(busy) if any(busy) else 1.0,
        predicted_ratio=sum(one.predicted_tokens for one in served) / cached if predicts and cached else None,
    )


def _hit_rate(served: Sequence[ReplayedRequest]) -> float:
    return sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
