"""The `prefix_affinity` strategy: sends a call to the deployment where it is predicted to cost the fewest seconds.

The cost is one number, and no threshold of load turns affinity off. All terms are predictions:

    cost = queued                                  until the prompts that were sent before are computed, and until
                                                   blocks of another deployment are loaded (`block_source.py`)
         + POPULAR_WEIGHT * popular / rate         to compute what many prompts begin with
         + own / rate * (1 + delays + interrupted + overtaken)  to compute the rest, and to let others wait for it
         + lost / rate * (1 + pressure)            to compute again, later, what this evicts from the cache
         + SLOWDOWN_WEIGHT * slowdown              of the answer by the calls that are in flight
         - stay                                    if this deployment has the conversation cached that it continues
         - PIN_SECONDS                             if the client's session name belongs to this deployment

`queued` and `slowdown` are what this call waits; for one of a background class, such as a batch's, they count only
`BATCH_PATIENCE` times, because throughput matters there, and moving a conversation costs it.

    rate        the deployment's learned speed, in tokens per second. All lengths are work: tokens behind others count
                more, by what attention was measured to cost (`gateway/prefix/prefill_speed.py`)
    popular     the uncached part of a beginning with which more calls begin than the deployments that have it cached
                should serve (`gateway/prefix/popularity.py`): this call waits for it, and later ones use the copy, too
    own         the rest of the prompt's uncached part. What is loaded from another deployment counts as cached
    pressure    how many seconds a second of computation delays later calls: utilisation / (1 - utilisation) of all
                deployments, but at most as many calls as wait while one computes (`FleetTraffic.pressure`)
    delays      sqrt(pressure * pressure of this deployment alone) * (1 + (queued + own / 2) / mean of a prompt): the
                longer it stays busy, the more calls arrive meanwhile, and wait. But a conversation waits with one call
                at a time, so they are at most `DELAYED_MAX` times the most that were there at once lately, and those
                that are queued. An idle one delays no other call, so conversations that evict each other part. The
                fleet counts, too: in the long run all are equally busy
    interrupted SLOWDOWN_WEIGHT * in_flight: prompts are computed between the tokens of answers, which end later by
                that. Calls count that will be sent there once a prefix is computed (`shared_prefill.py`)
    overtaken   these calls again: they are sent after this prompt
    lost        to compute again what computing the prompt evicts and other calls will need: nothing while the cache has
                room (`gateway/prefix/reuse.py`)
    slowdown    learned (`gateway/prefix/decode_speed.py`); until then `LOAD_SECONDS * in_flight / slots`
    stay        what a move must gain (`gateway/prefix/staying.py`), while the cache has room for what it computes

Of many deployments, only a few are compared (`shortlist.py`). Differences below 0.1 ms decide nothing; then calls in
flight and the order do. `lost` does not count tokens that more than half of the deployments have cached: one more copy
of them costs little. So a prefix that all hold favours none. Another one is copied when waiting for it costs more than
computing it there.

Minimal path 6 of 7. Next: ../providers/base.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import msgspec
import xxhash

from gateway.deployments.state import DeploymentState
from gateway.prefix.cache_runs import CachePrediction
from gateway.prefix.estimate import Estimate
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.fleet_traffic import speed_of
from gateway.prefix.prefill_speed import PrefillSpeed
from gateway.prefix.staying import stay_seconds
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate
from gateway.routing.block_source import Holder, find_holders, load_seconds
from gateway.routing.jump_hash import jump_hash
from gateway.routing.shortlist import shortlist

POPULAR_WEIGHT = 0.5  # of a second to compute a popular beginning; of the rest of a prompt, at least 1
DELAYED_MAX = 6  # a prompt delays at most so many times the calls that were at the deployment at once lately
SLOWDOWN_WEIGHT = 0.3  # of a second by which an answer ends later; a second before its first chunk counts as 1
LOAD_SECONDS = 0.5  # what a deployment with all slots in use adds to a response's time, until that is learned
BATCH_PATIENCE = 0.1  # what a second of waiting counts for a call of a background class; for others, 1
PIN_SECONDS = 0.25  # the most seconds that a client's session name may cost: it is a hint, not a command
_ESTIMATE, _NAME = attrgetter("estimate"), attrgetter("name")


class PrefixAffinity:
    """Ranks deployments by predicted seconds. Stateless."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        if not deployments:
            return []
        chain, prompt_tokens = call.fingerprint, call.prompt_tokens_estimate
        estimates = tuple(map(_ESTIMATE, deployments))
        home = _session_home(call.session, deployments, estimates) if call.session is not None else None
        patience = BATCH_PATIENCE if call.may_be_held else 1.0
        if len(deployments) == 1:
            return [_only_candidate(deployments[0], chain, prompt_tokens, patience, now, home)]
        compared, others = shortlist(chain, deployments, estimates, home)
        predictions = [deployment.predict_cache(chain, now) for deployment in compared]
        cached = [
            deployment.expected_cached_tokens(prediction)
            for deployment, prediction in zip(compared, predictions, strict=True)
        ]
        # The lower median: more than half of the deployments have cached at least as much.
        common_tokens = sorted(cached)[(len(cached) - 1) // 2]
        traffic = estimates[0].traffic
        pressure, mean_work = traffic.pressure(estimates, now)
        popular = traffic.popular_beginning(chain, len(deployments), cached)
        holders = find_holders(chain, compared, cached, now)
        prompt = _Prompt(
            prompt_tokens, common_tokens, max(cached), popular, pressure, mean_work, patience,
            traffic.queued_calls, compared, holders,
        )  # fmt: skip
        candidates = [
            _candidate(one, prediction, prompt, cached_tokens, speed_of(one.estimate, estimates), now, home)
            for one, prediction, cached_tokens in zip(compared, predictions, cached, strict=True)
        ]
        candidates.sort(key=lambda c: (c.deployment.is_deprioritised(now), round(c.cost_seconds, 4), c.in_flight))
        if others:
            worst_seconds = max([candidate.cost_seconds for candidate in candidates])
            # Their caches were not looked up: they are taken to have nothing of the prompt.
            candidates += [
                Candidate(
                    deployment, worst_seconds + (estimate := deployment.estimate).standing_seconds, prompt_tokens, 0,
                    estimate.queue.tokens, estimate.in_flight,
                )
                for deployment in others
            ]  # fmt: skip
        return candidates

    def only(self, call: RoutedPrompt, deployment: DeploymentState, now: float) -> Candidate:
        estimate, prediction = deployment.estimate, deployment.predict_cache(call.fingerprint, now)
        cached, queued = int(deployment.expected_cached_tokens(prediction)), estimate.queued_work(now)
        tokens, in_flight = call.prompt_tokens_estimate, estimate.in_flight
        return Candidate(deployment, 0.0, tokens, cached, queued, in_flight, 0.0, prediction)


class _Prompt(msgspec.Struct, frozen=True):
    """What the costs of one prompt at all deployments have in common. Lengths are in tokens."""

    tokens: int
    common: float  # cached at more than half of the deployments
    most: float  # cached at one of the deployments
    popular: int  # that another deployment should have, too
    pressure: float
    mean_work: float  # of other prompts
    patience: float  # what a second of waiting counts
    queued_calls: int  # in the gateway's own queue
    deployments: Sequence[DeploymentState]  # that are compared
    holders: dict[str, Holder]  # by model, those of these that can send most of it to others


def _only_candidate(
    deployment: DeploymentState, chain: Sequence[int], tokens: int, patience: float, now: float, home: Estimate | None
) -> Candidate:
    """The candidate if there is no other: the same as among several, of which none differs from it."""
    estimate, prediction = deployment.estimate, deployment.predict_cache(chain, now)
    cached_tokens = deployment.expected_cached_tokens(prediction)
    pressure, mean_work = estimate.traffic.pressure((estimate,), now)
    prompt = _Prompt(tokens, cached_tokens, cached_tokens, 0, pressure, mean_work, patience, 0, (deployment,), {})
    return _candidate(deployment, prediction, prompt, cached_tokens, estimate.speed.fitted(), now, home)


def _candidate(
    deployment: DeploymentState, prediction: CachePrediction, prompt: _Prompt, cached_tokens: float,
    speed: PrefillSpeed, now: float, home: Estimate | None,
) -> Candidate:  # fmt: skip
    """The candidate and its cost, by the formula in the module's docstring."""
    estimate, rate, attention = deployment.estimate, speed.fitted_tokens_per_second, speed.fitted_attention
    queued_work = estimate.queued_work(now)
    tokens, popular, common = prompt.tokens, prompt.popular, prompt.common
    # `prefill_speed.work_of`, without calls: of all that is not cached, of the popular part of it, and of the rest.
    work = popular_work = 0.0
    own_tokens, queued_seconds = cached_tokens, estimate.queued_seconds(queued_work)
    if prompt.holders and (holder := prompt.holders.get(deployment.config.model)) is not None:
        loaded_in_seconds = load_seconds(deployment, holder, cached_tokens, speed, now)
        if loaded_in_seconds is not None:
            cached_tokens = holder.tokens
            queued_seconds = max(queued_seconds, loaded_in_seconds)
    if tokens > cached_tokens:
        work = (tokens - cached_tokens) * (1 + attention * (tokens + cached_tokens) / 2)
        if popular > cached_tokens:
            popular_work = (popular - cached_tokens) * (1 + attention * (popular + cached_tokens) / 2)
    own_work = work - popular_work
    lost_work = deployment.eviction_loss(tokens - (own_tokens if own_tokens > common else common), now)
    typical_work = prompt.mean_work if prompt.mean_work > BLOCK_TOKENS else BLOCK_TOKENS
    own_pressure = math.sqrt(prompt.pressure * estimate.pressure)
    delayed_calls = (queued_work + own_work / 2) / typical_work
    most_calls = DELAYED_MAX * estimate.most_calls + prompt.queued_calls
    delays = own_pressure * (1 + (delayed_calls if delayed_calls < most_calls else most_calls))
    in_flight = estimate.total_in_flight(now) + estimate.waiting_for_prefix
    own_weight = 1 + delays + SLOWDOWN_WEIGHT * in_flight + estimate.waiting_for_prefix
    weighted_work = POPULAR_WEIGHT * popular_work + own_work * own_weight + lost_work * (1 + prompt.pressure)
    waiting_seconds = queued_seconds + _slowdown_seconds(deployment, estimate, in_flight)
    cost_seconds = prompt.patience * waiting_seconds + weighted_work / rate
    ttft_seconds = queued_seconds + work / rate + speed.fitted_overhead_seconds
    if common < own_tokens == prompt.most and not (popular or lost_work):
        cost_seconds -= stay_seconds(prediction, map(_ESTIMATE, prompt.deployments))
    if estimate is home:
        cost_seconds -= PIN_SECONDS
    return Candidate(
        deployment, cost_seconds, tokens, int(own_tokens), queued_work, estimate.in_flight,
        ttft_seconds, prediction,
    )  # fmt: skip


def _slowdown_seconds(deployment: DeploymentState, estimate: Estimate, in_flight: int) -> float:
    """What it costs that the calls in flight make the answer end later."""
    if not estimate.decode.is_measured:
        return LOAD_SECONDS * in_flight / deployment.slots
    return SLOWDOWN_WEIGHT * estimate.decode.slowdown_of(in_flight)


def _session_home(session: str, deployments: Sequence[DeploymentState], estimates: tuple[Estimate, ...]) -> Estimate:
    """The deployment of the session's last call. For a new session, one by a hash that all gateways compute alike."""
    known = deployments[0].working_set.home_of(session)
    if known is not None:
        return known
    # Policies may list them in another order.
    by_name = estimates[0].traffic.by_name(estimates, lambda: map(_NAME, deployments))
    return by_name[jump_hash(xxhash.xxh3_64_intdigest(session.encode()), len(by_name))]
