"""Send a call where its prefix is warm, unless that server's work would make it wait longer than computing anew.

The cost is one number in predicted seconds, without thresholds and without a switch that drops affinity:

    cost = missing / speed                       what has to be computed
         + EVICTION_WEIGHT * lost / speed        what that drives out of the cache, and others will miss
         + queued / speed                        what is computed before it
         + calls under way / places * LOAD_SECONDS
         - PIN_SECONDS, where the conversation that its client names was, or would be

`lost` is as much as is computed, but for what half of the servers hold: one copy more of that costs little. Of servers
that tell what is in their caches it is what will have to go, as far as it was used lately: where the oldest is of no
use any more nothing is lost, and when conversations do not fit, few of them lose much and not all of them all. So a
prefix that everybody holds distinguishes nobody, and a hot one comes to be held by another server as soon as waiting
costs more than computing it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from gateway.deployments.fleet import DeploymentState
from gateway.prefix.cache_model import CachePrediction
from gateway.prefix.estimate import Estimate
from gateway.prefix.working_set import RoutedPrompt
from gateway.routing.base import Candidate

EVICTION_WEIGHT = 5.0
LOAD_SECONDS = 0.5  # what a server with all places taken adds to an answer's time, compared with an idle one
PIN_SECONDS = 0.25  # the most that a client's word may cost: a hint, and never a command


class PrefixAffinity:
    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        if len(deployments) == 1:  # nothing to compare: what it would be compared by is only told
            return [_only_candidate(call, deployments, now)]
        chain, prompt = call.fingerprint, call.prompt_tokens_estimate
        beliefs: list[CachePrediction] = []
        warm: list[float] = []
        for deployment in deployments:
            estimate = deployment.estimate
            beliefs.append(prediction := deployment.predict_cache(chain, now))
            warm.append(estimate.expected_cached_tokens(prediction))
        common = sorted(warm)[(len(warm) - 1) // 2] if warm else 0.0
        home = _session_home(call.session, deployments) if call.session is not None and deployments else None
        candidates: list[Candidate] = []
        for deployment, prediction, cached in zip(deployments, beliefs, warm, strict=True):
            estimate = deployment.estimate
            rate = (
                estimate.prefill_tokens_per_second if estimate.speed_is_known else _assumed_rate(estimate, deployments)
            )
            own = prompt - max(cached, common)
            candidates.append(
                _candidate(deployment, prediction, prompt, cached, own, rate, now, pinned=estimate is home)
            )
        candidates.sort(key=lambda c: (c.deployment.is_deprioritised(now), c.cost_seconds, c.in_flight))
        return candidates


def _only_candidate(call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> Candidate:
    (deployment,) = deployments
    prediction = deployment.predict_cache(call.fingerprint, now)
    prompt, cached = call.prompt_tokens_estimate, deployment.estimate.expected_cached_tokens(prediction)
    rate = deployment.estimate.prefill_tokens_per_second
    pinned = call.session is not None and _session_home(call.session, deployments) is deployment.estimate
    return _candidate(
        deployment,
        prediction,
        prompt,
        cached,
        prompt - cached,
        rate,
        now,
        pinned=pinned,
    )


def _candidate(
    deployment: DeploymentState, prediction: CachePrediction, prompt: int, cached: float, own: float, rate: float,
    now: float, *, pinned: bool,
) -> Candidate:  # fmt: skip
    """`own`: tokens that are computed there, and that too few others hold."""
    estimate = deployment.estimate
    queued = estimate.queued_tokens(now)
    load = LOAD_SECONDS * estimate.total_in_flight(now) / deployment.slots
    lost = EVICTION_WEIGHT * deployment.eviction_loss_tokens(own, now)
    cost_seconds = (prompt - cached + lost + queued) / rate + load
    if pinned:
        cost_seconds -= PIN_SECONDS
    return Candidate(deployment, cost_seconds, prompt, int(cached), queued, estimate.in_flight, prediction)


def _session_home(session: str, deployments: Sequence[DeploymentState]) -> Estimate:
    """Where the conversation of this name was; of one that is new here, where every gateway would look for it."""
    known = deployments[0].working_set.home_of(session)
    if known is not None:
        return known
    return max(
        deployments, key=lambda deployment: xxhash.xxh3_64_intdigest(f"{session}@{deployment.name}".encode())
    ).estimate


def _assumed_rate(estimate: Estimate, deployments: Sequence[DeploymentState]) -> float:
    """The mean of those whose speed is known: one that nobody has asked yet would never be asked if the policy's guess
    were too low."""
    learnt = [s.estimate.prefill_tokens_per_second for s in deployments if s.estimate.speed_is_known]
    return sum(learnt) / len(learnt) if learnt else estimate.prefill_tokens_per_second
