"""Loads the beginning of a prompt from another deployment, instead of computing it.

A call goes to a deployment that lacks its prefix if those that have it are full or have too much to compute. If both
are bundled engines whose policy entries have `kv_transfer_tokens_per_second`, the request names the holder, and the
engine loads the blocks from it (`docs/explanation/engine.md`). The strategy asks how long that takes before it chooses
(`load_seconds`), so a conversation moves as soon as another deployment is less busy.

The blocks are worth loading if that is predicted to take less time than to compute them:

    OVERHEAD_SECONDS + tokens / kv_transfer_tokens_per_second < work / tokens_per_second

What the holder has still to compute can be loaded afterwards. The call waits for it (`shared_prefill.py`) if that takes
at most 1 / WAITED_WEIGHT of the time that the load saves, and only for a deployment that has nothing else to compute:
in the queue of another one, it would come later. If a prediction is wrong, or the holder fails, the engine computes
what is missing. If replies show that loads to a deployment fail repeatedly, none is counted on for a while
(`DeploymentState.note_load`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gateway.deployments.state import DeploymentState
from gateway.prefix.prefill_speed import PrefillSpeed, work_of
from gateway.routing.base import Candidate
from gateway.routing.shared_prefill import SHARED_MIN_SECONDS

OVERHEAD_SECONDS = 0.02  # of a load: connection, lookups, and the copies between steps
WAITED_WEIGHT = 0.5  # of a second of waiting for the holder, beside a second that is not computed


class Holder(NamedTuple):
    """A deployment that has some of a prompt, and sends it to others."""

    deployment: DeploymentState
    tokens: float  # fingerprint tokens that it has
    ready_seconds: float  # until it has computed them


def find_holders(
    fingerprint: Sequence[int], deployments: Sequence[DeploymentState], cached: Sequence[float], now: float
) -> dict[str, Holder]:
    """By the model that they serve, the deployments that can send most of a prompt to others.

    `cached` has the tokens that each deployment is expected to have. If these are still to be computed, fewer of them
    count, so that another deployment that has them may be preferred.
    """
    best: dict[str, Holder] = {}
    most: dict[str, float] = {}
    for deployment, tokens in zip(deployments, cached, strict=True):
        if deployment.kv_transfer_rate is None or not tokens:
            continue
        model = deployment.config.model
        if tokens <= most.get(model, 0.0) or not deployment.breaker.would_admit(now):
            continue
        worth, seconds = tokens, _ready_seconds(deployment, fingerprint, now)
        if seconds:
            rate = deployment.estimate.prefill_tokens_per_second
            worth = tokens - WAITED_WEIGHT * rate * seconds if tokens >= SHARED_MIN_SECONDS * rate else 0.0
        if worth > most.get(model, 0.0):
            best[model], most[model] = Holder(deployment, tokens, seconds), worth
    return best


def load_seconds(
    target: DeploymentState, holder: Holder, own_tokens: float, speed: PrefillSpeed, now: float
) -> float | None:
    """When the target will have loaded the tokens that it lacks; None if it should compute them, at this speed."""
    rate, tokens = target.kv_transfer_rate, holder.tokens
    if rate is None or tokens <= own_tokens or holder.deployment is target or now < target.loads_resume_at:
        return None
    seconds = OVERHEAD_SECONDS + (tokens - own_tokens) * target.estimate.tokens_scale / rate
    saved_seconds = work_of(own_tokens, tokens, speed.fitted_attention) / speed.fitted_tokens_per_second - seconds
    waited_seconds = holder.ready_seconds
    if saved_seconds <= WAITED_WEIGHT * waited_seconds or (waited_seconds and target.estimate.queue.prompts):
        return None
    return waited_seconds + seconds


def with_block_source(
    fingerprint: Sequence[int], candidate: Candidate, candidates: Sequence[Candidate], now: float
) -> Candidate:
    """The candidate with the one of the others from which it should load blocks of a prompt, if there is any."""
    target = candidate.deployment
    if target.kv_transfer_rate is None:
        return candidate
    known = [one for one in candidates if one.prediction is not None]
    deployments, matched = [one.deployment for one in known], [one.matched_tokens for one in known]
    holder = find_holders(fingerprint, deployments, matched, now).get(target.config.model)
    if holder is None:
        return candidate
    speed = target.estimate.speed.fitted()
    if load_seconds(target, holder, candidate.matched_tokens, speed, now) is None:
        return candidate
    return msgspec.structs.replace(candidate, block_source=known[deployments.index(holder.deployment)])


def _ready_seconds(holder: DeploymentState, fingerprint: Sequence[int], now: float) -> float:
    """How long it takes until the deployment has computed what it is expected to have of a prompt.

    Blocks that are still to be computed count as cached, so that calls with the same prefix are routed there.
    """
    queue = holder.estimate.queue
    shared = queue.find_shared(fingerprint) if queue.tokens else None
    return 0.0 if shared is None else queue.seconds_until(shared, now)
