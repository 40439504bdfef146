"""Strategies of other routers, by their published rules and default weights. They are not the products themselves.

`ActualEngine` gives them better information than the gateway's router has: Dynamo's rule knows the real content of the
caches, as from KV events. SGLang's rule uses its own history of requests, without evictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from gateway.deployments.fleet import DeploymentState
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate
from gateway.simulator.simulated_engine import SimulatedEngine

ActualEngine = Callable[[DeploymentState], SimulatedEngine]

HASHED_TOKENS = 256  # of the prompt's beginning, as in routers that hash it
SGLANG_MATCH_SHARE = 0.5
SGLANG_LOAD_DIFFERENCE = 32
SGLANG_LOAD_RATIO = 1.1
DYNAMO_BLOCK_TOKENS = 16
UNBOUNDED_TOKENS = 10**12


def _ranked(call: RoutedPrompt, deployments: Sequence[DeploymentState], costs: Sequence[float]) -> list[Candidate]:
    """Candidates by cost, and those of equal cost by calls in flight."""
    candidates = [
        Candidate(deployment, cost, call.prompt_tokens_estimate, 0, 0.0, deployment.in_flight)
        for deployment, cost in zip(deployments, costs, strict=True)
    ]
    return sorted(candidates, key=lambda candidate: (candidate.cost_seconds, candidate.in_flight))


class FewestCalls:
    """Least busy: the fewest calls in flight."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [deployment.in_flight for deployment in deployments])


class ConsistentHash:
    """The hash of the prompt's first tokens selects the deployment (rendezvous hashing)."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        head = call.fingerprint[: HASHED_TOKENS // BLOCK_TOKENS][-1:]
        return _ranked(
            call,
            deployments,
            [xxhash.xxh3_64_intdigest(f"{head}{deployment.name}".encode()) for deployment in deployments],
        )


class SGLangRule:
    """SGLang's cache-aware policy: the longest match if it covers at least half of the prompt, else the smallest tree.

    While the loads differ too much, the least loaded deployment, whatever matches.
    """

    def __init__(self) -> None:
        self._trees: dict[str, CacheModel] = {}

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        trees = [self._trees.setdefault(deployment.name, CacheModel(UNBOUNDED_TOKENS)) for deployment in deployments]
        loads = [deployment.in_flight for deployment in deployments]
        most, least = max(loads), min(loads)
        if most - least > SGLANG_LOAD_DIFFERENCE and most > SGLANG_LOAD_RATIO * least:
            ranked = _ranked(call, deployments, loads)
        else:
            matches = [tree.match(call.fingerprint) for tree in trees]
            if max(matches) * BLOCK_TOKENS > SGLANG_MATCH_SHARE * call.prompt_tokens_estimate:
                ranked = _ranked(call, deployments, [-match for match in matches])
            else:
                ranked = _ranked(call, deployments, [len(tree) for tree in trees])
        self._trees[ranked[0].deployment.name].add(call.fingerprint)
        return ranked


class DynamoCost:
    """Dynamo's cost: blocks to prefill, including those of earlier calls, and blocks of calls in flight."""

    def __init__(self, actual_engine: ActualEngine) -> None:
        self._actual_engine = actual_engine

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [self._blocks(call, deployment) for deployment in deployments])

    def _blocks(self, call: RoutedPrompt, deployment: DeploymentState) -> float:
        warm = self._actual_engine(deployment).cache.match(call.fingerprint) * BLOCK_TOKENS
        to_prefill = max(0, call.prompt_tokens_estimate - warm) + deployment.estimate.prefill_tokens_queued
        return (to_prefill + deployment.estimate.prompt_tokens_in_flight) / DYNAMO_BLOCK_TOKENS


class ShortestQueue:
    """The engine that is done first with the prompts it has: with one pooled cache, only the queues differ."""

    def __init__(self, actual_engine: ActualEngine) -> None:
        self._actual_engine = actual_engine

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [self._seconds(call, deployment) for deployment in deployments])

    def _seconds(self, call: RoutedPrompt, deployment: DeploymentState) -> float:
        engine = self._actual_engine(deployment)
        cached_tokens = engine.cache.match(call.fingerprint) * BLOCK_TOKENS
        tokens = engine.queued_tokens() + call.prompt_tokens_estimate - cached_tokens
        return (tokens * engine.timing.prefill_token + engine.running * engine.timing.decode) / engine.speed
