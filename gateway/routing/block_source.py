"""Chooses the deployment from which another one loads the beginning of a prompt, instead of computing it.

A call goes to a deployment that lacks its prefix if those that have it are full or have too much to compute. If both
are bundled engines whose policy entries have `kv_transfer_tokens_per_second`, the request names the holder, and the
engine loads the blocks from it (`docs/explanation/engine.md`). The choice of the deployment does not depend on this.

The blocks are worth loading if that is predicted to take less time than to compute them:

    OVERHEAD_SECONDS + tokens / kv_transfer_tokens_per_second < work / tokens_per_second

If the prediction is wrong, or the holder fails, the engine computes what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.deployments.state import DeploymentState
from gateway.routing.base import Candidate
from gateway.types import Call

OVERHEAD_SECONDS = 0.02  # of a load: connection, lookups, and the copies between steps


def with_block_source(call: Call, candidate: Candidate, candidates: Sequence[Candidate], now: float) -> Candidate:
    """The candidate with the one of the others from which it should load blocks, if there is any."""
    rate = candidate.deployment.kv_transfer_rate
    if rate is None or not call.has_prefix:
        return candidate
    own_tokens = candidate.matched_tokens
    holders = [one for one in candidates if one.matched_tokens > own_tokens and _may_serve(one, candidate, call, now)]
    best = max(holders, key=lambda one: one.matched_tokens, default=None)
    if best is None:
        return candidate
    estimate = candidate.deployment.estimate
    load_seconds = OVERHEAD_SECONDS + (best.matched_tokens - own_tokens) * estimate.tokens_scale / rate
    compute_seconds = estimate.speed.work(own_tokens, best.matched_tokens) / estimate.prefill_tokens_per_second
    if compute_seconds <= load_seconds:
        return candidate
    return msgspec.structs.replace(candidate, block_source=best)


def _may_serve(holder: Candidate, candidate: Candidate, call: Call, now: float) -> bool:
    """Whether a deployment has blocks that the candidate can use: of the same model, computed, and reachable."""
    source, target = holder.deployment, candidate.deployment
    return (
        source is not target
        and holder.prediction is not None
        and source.kv_transfer_rate is not None
        and _model(source, call) == _model(target, call)
        and source.breaker.would_admit(now)
        # Blocks that are still to be computed count as cached, so that calls with the same prefix are routed there.
        and source.estimate.queue.find_shared(call.fingerprint) is None
    )


def _model(deployment: DeploymentState, call: Call) -> str:
    return deployment.config.model_for(call.wildcard)
