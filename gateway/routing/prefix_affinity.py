"""The `prefix_affinity` strategy: sends a call to the deployment where it is predicted to cost the fewest seconds.

The cost is one number, without thresholds, and without a switch that turns affinity off. All terms are predictions:

    cost = uncached / rate                      to compute the prompt's uncached tokens
         + EVICTION_WEIGHT * lost / rate        to compute again, later, what this evicts from the deployment's cache
         + queued / rate                        to compute the prompts that were sent before
         + LOAD_SECONDS * in_flight / slots     decoding slows down with the number of calls in flight
         - PIN_SECONDS                          if the client's session name belongs to this deployment

    uncached    tokens of the prompt that are not expected in the cache when its prefill begins
    rate        the deployment's learned prefill rate, in tokens per second
    lost        tokens that computing the prompt evicts and that other calls will need again
    queued      uncached tokens of earlier prompts, less what must have been computed since
    in_flight   calls at the deployment: of all gateways, and of all its clients if it reports its load

`lost` does not count tokens that more than half of the deployments have cached: one more copy of them costs little. At
a deployment that publishes KV events, `lost` is what will have to be evicted, weighted by how recently it was used. If
the oldest blocks are of no use any more, nothing is lost. If the conversations do not fit, a few of them lose much,
instead of all of them losing everything. At other deployments, `lost` is as much as is computed.

So a prefix that all deployments hold favours none of them. A popular prefix is copied to another deployment as soon as
waiting for it costs more than computing it there.

Minimal path 6 of 7. Next: ../providers/base.py.
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
LOAD_SECONDS = 0.5  # what a deployment with all slots in use adds to a response's time, compared with an idle one
PIN_SECONDS = 0.25  # the most seconds that a client's session name may cost: it is a hint, not a command


class PrefixAffinity:
    """Ranks deployments by predicted seconds. Stateless."""

    def order(self, call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> list[Candidate]:
        if len(deployments) == 1:  # the cost only explains the choice, so it needs no comparison
            return [_only_candidate(call, deployments, now)]
        chain, prompt_tokens = call.fingerprint, call.prompt_tokens_estimate
        predictions: list[CachePrediction] = []
        cached: list[float] = []
        for deployment in deployments:
            estimate = deployment.estimate
            predictions.append(prediction := deployment.predict_cache(chain, now))
            cached.append(estimate.expected_cached_tokens(prediction))
        # The lower median: more than half of the deployments have cached at least as much.
        common_tokens = sorted(cached)[(len(cached) - 1) // 2] if cached else 0.0
        home = _session_home(call.session, deployments) if call.session is not None and deployments else None
        candidates: list[Candidate] = []
        for deployment, prediction, cached_tokens in zip(deployments, predictions, cached, strict=True):
            estimate = deployment.estimate
            rate = (
                estimate.prefill_tokens_per_second if estimate.speed_is_known else _assumed_rate(estimate, deployments)
            )
            rare_tokens = prompt_tokens - max(cached_tokens, common_tokens)
            candidates.append(
                _candidate(
                    deployment,
                    prediction,
                    prompt_tokens,
                    cached_tokens,
                    rare_tokens,
                    rate,
                    now,
                    pinned=estimate is home,
                )
            )
        candidates.sort(key=lambda c: (c.deployment.is_deprioritised(now), c.cost_seconds, c.in_flight))
        return candidates


def _only_candidate(call: RoutedPrompt, deployments: Sequence[DeploymentState], now: float) -> Candidate:
    (deployment,) = deployments
    prediction = deployment.predict_cache(call.fingerprint, now)
    prompt_tokens, cached_tokens = call.prompt_tokens_estimate, deployment.estimate.expected_cached_tokens(prediction)
    rate = deployment.estimate.prefill_tokens_per_second
    pinned = call.session is not None and _session_home(call.session, deployments) is deployment.estimate
    rare_tokens = prompt_tokens - cached_tokens
    return _candidate(
        deployment, prediction, prompt_tokens, cached_tokens, rare_tokens, rate, now, pinned=pinned
    )  # fmt: skip


def _candidate(
    deployment: DeploymentState, prediction: CachePrediction, prompt_tokens: int, cached_tokens: float,
    rare_tokens: float, rate: float, now: float, *, pinned: bool,
) -> Candidate:  # fmt: skip
    """The candidate and its cost, by the formula in the module's docstring.

    `cached_tokens` are expected in the deployment's cache. `rare_tokens` must be computed there and are cached at half
    of the deployments at most. `rate` is the prefill rate in tokens per second.
    """
    estimate = deployment.estimate
    queued_tokens = estimate.queued_tokens(now)
    load_seconds = LOAD_SECONDS * estimate.total_in_flight(now) / deployment.slots
    lost_tokens = EVICTION_WEIGHT * deployment.eviction_loss_tokens(rare_tokens, now)
    cost_seconds = (prompt_tokens - cached_tokens + lost_tokens + queued_tokens) / rate + load_seconds
    if pinned:
        cost_seconds -= PIN_SECONDS
    return Candidate(
        deployment, cost_seconds, prompt_tokens, int(cached_tokens), queued_tokens, estimate.in_flight, prediction
    )


def _session_home(session: str, deployments: Sequence[DeploymentState]) -> Estimate:
    """The deployment of the session's last call. For a new session, one by rendezvous hashing.

    The hash lets all gateways choose the same deployment for a session that none of them knows.
    """
    known = deployments[0].working_set.home_of(session)
    if known is not None:
        return known
    return max(
        deployments, key=lambda deployment: xxhash.xxh3_64_intdigest(f"{session}@{deployment.name}".encode())
    ).estimate


def _assumed_rate(estimate: Estimate, deployments: Sequence[DeploymentState]) -> float:
    """The prefill rate to assume for a deployment whose rate is not yet learned: the mean of the learned ones.

    If the policy's guess were used and were too low, the deployment would never get a call, and never be measured.
    """
    learned = [s.estimate.prefill_tokens_per_second for s in deployments if s.estimate.speed_is_known]
    return sum(learned) / len(learned) if learned else estimate.prefill_tokens_per_second
