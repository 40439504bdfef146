"""Delays a call whose prefix is being computed for another call, so that a burst computes it once.

An engine reuses blocks that it has computed, but not blocks that it is computing. Calls of a burst with one prefix
would all compute it if they were sent at once. So the first call is sent, and the others wait for its first chunk. The
wait ends at the latest after `WAIT_FACTOR_MAX` times the predicted time of that prefill.
"""

from __future__ import annotations

import asyncio

from gateway.deployments.fleet import DeploymentState
from gateway.prefix.estimate import shared_blocks
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.types import Call

SHARED_MIN_SECONDS = 0.1  # of prefill that waiting must save
WAIT_FACTOR_MAX = 2.0  # times the predicted time of the queued prefills


async def wait_for_shared_prefill(call: Call, deployment: DeploymentState, deadline: float) -> None:
    """Wait while the deployment computes a prefix that this call needs too. `deadline` is in event-loop seconds."""
    estimate = deployment.estimate
    rate = estimate.prefill_tokens_per_second
    min_tokens = SHARED_MIN_SECONDS * rate
    if estimate.prefill_tokens_queued < min_tokens or call.prompt_tokens_estimate < min_tokens:
        return
    shared = estimate.find_shared_prefill(call.fingerprint, min_tokens)
    if shared is None:
        return
    loop = asyncio.get_running_loop()
    saved_blocks = shared_blocks(shared.chain, call.fingerprint) - shared.prediction.matched
    if saved_blocks * BLOCK_TOKENS / rate < SHARED_MIN_SECONDS:
        return
    queue_seconds = estimate.queued_tokens(loop.time()) / rate
    prefilled: asyncio.Future[None] = loop.create_future()
    shared.on_prefilled.append(lambda: None if prefilled.done() else prefilled.set_result(None))
    await asyncio.wait([prefilled], timeout=max(0.0, min(WAIT_FACTOR_MAX * queue_seconds, deadline - loop.time())))
