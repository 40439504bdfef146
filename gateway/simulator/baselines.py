"""Routing rules of other routers, with the constants that these versions have by default. Not the products themselves.

    CacheAware        sglang-router 0.3.2 and vllm-router 0.1.17 (`cache_aware`), both from PyPI in November 2026
    WeightedScorers   llm-d 0.4's guide to precise prefix cache routing: prefix 3, queue 2, KV cache utilisation 2
    AffinityFilter    llm-d-router of August 2026: prefix-cache-affinity-filter, then token-load-scorer
    DynamoCost        Dynamo 1.5's KV router: overlap credit 1, prefill load scale 1, temperature 0
    LongestPrefix     vLLM production-stack of August 2026: `prefixaware`
    ConsistentHash    OpenAI's documented routing by the first 256 tokens, as rendezvous hashing

`ActualEngine` gives some of them better information than any router has: what the engine's cache and queues hold at
this moment, as from KV events and metrics without delay. The rules that keep a history of their own have the same here.
llm-d, Dynamo and production-stack choose randomly between equal candidates. The random numbers are seeded, so equal
traces give equal results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import xxhash

from gateway.deployments.state import DeploymentState
from gateway.prefix.cache_model import CacheModel
from gateway.prefix.fingerprint import BLOCK_TOKENS, BYTES_PER_TOKEN
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate
from gateway.simulator.simulated_engine import SimulatedEngine

ActualEngine = Callable[[DeploymentState], SimulatedEngine]

HASHED_TOKENS = 256  # of the prompt's beginning, as in routers that hash it
SEED = 1
UNBOUNDED_TOKENS = 10**12

CACHE_THRESHOLD = 0.3  # this and the next two of `cache_aware`, by both routers' `--help`
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
SGLANG_TREE_CHARACTERS = 67_108_864  # per worker
VLLM_TREE_CHARACTERS = 33_554_432

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_USAGE_WEIGHT = 3.0, 2.0, 2.0
AFFINITY_THRESHOLD = 0.8  # share of the prompt's blocks
MAX_TTFT_PENALTY_SECONDS = 18.0
PEAK_PREFILL_TOKENS_PER_SECOND = 15_928.0


def _ranked(call: RoutedPrompt, deployments: Sequence[DeploymentState], costs: Sequence[float]) -> list[Candidate]:
    """Candidates by cost, and those of equal cost in their own order."""
    candidates = [
        Candidate(deployment, cost, call.prompt_tokens_estimate, 0, 0.0, deployment.in_flight)
        for deployment, cost in zip(deployments, costs, strict=True)
    ]
    return sorted(candidates, key=lambda candidate: candidate.cost_seconds)


class FewestCalls:
    """Least busy: the fewest calls in flight."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [deployment.in_flight for deployment in deployments])


class ConsistentHash:
    """The hash of the prompt's first tokens selects the deployment."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        head = call.fingerprint[: HASHED_TOKENS // BLOCK_TOKENS][-1:]
        return _ranked(
            call,
            deployments,
            [xxhash.xxh3_64_intdigest(f"{head}{deployment.name}".encode()) for deployment in deployments],
        )


class CacheAware:
    """`cache_aware`: the longest match in a history of prompts, if it covers enough of the prompt; else the least load.

    While the loads, in calls, differ too much, always the least load. If several workers have the longest match, the
    one that was chosen last gets the call.
    """

    def __init__(self, tree_characters: int) -> None:
        self._tree_tokens = tree_characters // BYTES_PER_TOKEN
        self._trees: dict[str, CacheModel] = {}
        self._last_sent: dict[str, int] = {}  # a growing number, by worker

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        loads = [deployment.in_flight for deployment in deployments]
        most, least = max(loads), min(loads)
        costs: list[float] = [*loads]
        if most - least <= BALANCE_ABS_THRESHOLD or most <= BALANCE_REL_THRESHOLD * least:
            matches = [self._tree(deployment).match(call.fingerprint) for deployment in deployments]
            longest = max(matches)
            if longest * BLOCK_TOKENS > CACHE_THRESHOLD * call.prompt_tokens_estimate:
                costs = [
                    -self._last_sent.get(deployment.name, 0) if match == longest else load
                    for deployment, match, load in zip(deployments, matches, loads, strict=True)
                ]
        ranked = _ranked(call, deployments, costs)
        chosen = ranked[0].deployment
        self._tree(chosen).add(call.fingerprint)
        self._last_sent[chosen.name] = max(self._last_sent.values(), default=0) + 1
        return ranked

    def _tree(self, deployment: DeploymentState) -> CacheModel:
        tree = self._trees.get(deployment.name)
        if tree is None:
            tree = self._trees[deployment.name] = CacheModel(self._tree_tokens)
        return tree


class _WithActualEngines:
    """What rules have in common that see the engines' caches and queues."""

    def __init__(self, actual_engine: ActualEngine) -> None:
        self._actual_engine = actual_engine
        self._lots = random.Random(SEED)

    def _engines(self, deployments: Sequence[DeploymentState]) -> list[SimulatedEngine]:
        return [self._actual_engine(deployment) for deployment in deployments]

    def _by_score(
        self, call: RoutedPrompt, deployments: Sequence[DeploymentState], scores: Sequence[float]
    ) -> list[Candidate]:
        """The highest score first, and equal ones in random order."""
        order = list(zip(deployments, scores, strict=True))
        self._lots.shuffle(order)
        return _ranked(call, [deployment for deployment, _ in order], [-score for _, score in order])


def _cached_shares(call: RoutedPrompt, engines: Sequence[SimulatedEngine]) -> list[float]:
    blocks = max(1, len(call.fingerprint))
    return [engine.cache.match(call.fingerprint) / blocks for engine in engines]


class WeightedScorers(_WithActualEngines):
    """llm-d's weighted scorers: cached share of the prompt, waiting requests, and free share of the cache."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        engines = self._engines(deployments)
        waiting = [len(engine.waiting) for engine in engines]
        most, least = max(waiting), min(waiting)
        scores = [
            PREFIX_WEIGHT * share
            + QUEUE_WEIGHT * ((most - count) / (most - least) if most > least else 1.0)
            + KV_USAGE_WEIGHT * (1 - engine.used_share)
            for share, count, engine in zip(_cached_shares(call, engines), waiting, engines, strict=True)
        ]
        return self._by_score(call, deployments, scores)


class AffinityFilter(_WithActualEngines):
    """llm-d's affinity filter: only deployments that have most of the prompt, unless they are much busier.

    The deployment with the fewest prompt tokens in flight gets the call.
    """

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        shares = _cached_shares(call, self._engines(deployments))
        tokens = [deployment.estimate.prompt_tokens_in_flight for deployment in deployments]
        sticky = [share >= AFFINITY_THRESHOLD for share in shares]
        if any(sticky) and not all(sticky):
            best = min(count for count, is_sticky in zip(tokens, sticky, strict=True) if is_sticky)
            best_other = min(count for count, is_sticky in zip(tokens, sticky, strict=True) if not is_sticky)
            if (best - best_other) / PEAK_PREFILL_TOKENS_PER_SECOND > MAX_TTFT_PENALTY_SECONDS:
                sticky = [False] * len(sticky)
        scores = [
            -count + (UNBOUNDED_TOKENS if is_sticky else 0) for count, is_sticky in zip(tokens, sticky, strict=True)
        ]
        return self._by_score(call, deployments, scores)


class DynamoCost(_WithActualEngines):
    """Dynamo's cost: blocks to prefill, and blocks in use by running requests; both with the new request's.

    Prefills count in full until their first token. A block that several requests use counts once.
    """

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        costs = [self._blocks(call, engine) for engine in self._engines(deployments)]
        return self._by_score(call, deployments, [-cost for cost in costs])

    def _blocks(self, call: RoutedPrompt, engine: SimulatedEngine) -> float:
        cached, unused = engine.cache.match_unused(call.fingerprint)
        waiting = sum(job.prompt_tokens for job in engine.waiting)
        prefill_tokens = engine.prefill_tokens_charged + call.prompt_tokens_estimate - cached * BLOCK_TOKENS
        active_tokens = waiting + call.prompt_tokens_estimate - (cached - unused) * BLOCK_TOKENS
        active_blocks = engine.cache.pinned + engine.cache.private
        return active_blocks + (max(0, prefill_tokens) + active_tokens) / BLOCK_TOKENS


class LongestPrefix(_WithActualEngines):
    """production-stack's `prefixaware`: the longest match in a history that forgets nothing, whatever the load."""

    def __init__(self, actual_engine: ActualEngine) -> None:
        super().__init__(actual_engine)
        self._trees: dict[str, CacheModel] = {}

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        trees = [self._trees.setdefault(deployment.name, CacheModel(UNBOUNDED_TOKENS)) for deployment in deployments]
        ranked = self._by_score(call, deployments, [tree.match(call.fingerprint) for tree in trees])
        self._trees[ranked[0].deployment.name].add(call.fingerprint)
        return ranked


class ShortestQueue(_WithActualEngines):
    """The engine that is done first with the prompts it has: with one pooled cache, only the queues differ."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        return _ranked(call, deployments, [self._seconds(call, engine) for engine in self._engines(deployments)])

    def _seconds(self, call: RoutedPrompt, engine: SimulatedEngine) -> float:
        cached_tokens = engine.cache.match(call.fingerprint) * BLOCK_TOKENS
        tokens = engine.queued_tokens() + call.prompt_tokens_estimate - cached_tokens
        return (tokens * engine.timing.prefill_token + engine.running * engine.timing.decode) / engine.speed
