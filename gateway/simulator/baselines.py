"""What others do, as we read their published rules with default weights; not the products themselves.

`Truth` gives them what they see better than our router does: Dynamo's rule is told the real content of the caches, as
its KV events would. SGLang's sees its own history of requests, without evictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from gateway.deployments.fleet import DeploymentState
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate

ActualCache = Callable[[DeploymentState], CacheModel]

HASHED_TOKENS = 256  # of a prompt's beginning, as in the routers that hash one
SGLANG_MATCH_SHARE = 0.5
SGLANG_LOAD_DIFFERENCE = 32
SGLANG_LOAD_RATIO = 1.1
DYNAMO_BLOCK_TOKENS = 16
UNBOUNDED_TOKENS = 10**12


def _ranked(call: RoutedPrompt, deployments: Sequence[DeploymentState], costs: Sequence[float]) -> list[Candidate]:
    """By cost, and equal ones by calls under way."""
    candidates = [
        Candidate(deployment, cost, call.prompt_tokens_estimate, 0, 0.0, deployment.in_flight)
        for deployment, cost in zip(deployments, costs, strict=True)
    ]
    return sorted(candidates, key=lambda candidate: (candidate.cost_seconds, candidate.in_flight))


class FewestCalls:
    """Least busy: the fewest calls under way."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [deployment.in_flight for deployment in deployments])


class ConsistentHash:
    """The prompt's first tokens choose the server, by rendezvous."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        head = call.fingerprint[: HASHED_TOKENS // BLOCK_TOKENS][-1:]
        return _ranked(
            call,
            deployments,
            [xxhash.xxh3_64_intdigest(f"{head}{deployment.name}".encode()) for deployment in deployments],
        )


class SGLangRule:
    """The cache-aware policy: where the longest match is, if it is at least half of the prompt; else the smallest tree.
    While the loads differ by too much, the least loaded, whatever matches."""

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
    """Blocks to prefill, those of the calls before it included, and blocks that are being decoded."""

    def __init__(self, truth: ActualCache) -> None:
        self._truth = truth

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [self._blocks(call, deployment) for deployment in deployments])

    def _blocks(self, call: RoutedPrompt, deployment: DeploymentState) -> float:
        warm = self._truth(deployment).match(call.fingerprint) * BLOCK_TOKENS
        to_prefill = max(0, call.prompt_tokens_estimate - warm) + deployment.estimate.prefill_tokens_queued
        return (to_prefill + deployment.estimate.prompt_tokens_in_flight) / DYNAMO_BLOCK_TOKENS


class ShortestQueue:
    """Of one pooled cache every server has everything: only what waits distinguishes them."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [deployment.estimate.queued_tokens(now) for deployment in deployments])
