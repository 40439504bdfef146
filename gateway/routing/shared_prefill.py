"""Of a burst of calls with one beginning, the first computes it, and the others wait for that before they are sent.

Sent at once they would all compute it, since an engine shares what it has computed and not what it is computing. The
wait ends with the first one's first chunk, and is bounded by the time that its prompt is predicted to take, twice.
"""

from __future__ import annotations

import asyncio

from gateway.deployments.fleet import DeploymentState
from gateway.prefix.estimate import shared_blocks
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.types import Call

SHARED_MIN_SECONDS = 0.1  # of computing that is spared: for less, nobody waits
WAIT_FACTOR_MAX = 2.0  # times what is predicted


async def wait_for_shared_prefill(call: Call, deployment: DeploymentState, deadline: float) -> None:
    """Wait while the server computes what this call would otherwise compute, too. `deadline`: event-loop seconds."""
    estimate = deployment.estimate
    rate = estimate.prefill_tokens_per_second
    at_least_tokens = SHARED_MIN_SECONDS * rate
    if estimate.prefill_tokens_queued < at_least_tokens or call.prompt_tokens_estimate < at_least_tokens:
        return
    leader = estimate.find_shared_prefill(call.fingerprint, at_least_tokens)
    if leader is None:
        return
    loop = asyncio.get_running_loop()
    spared = shared_blocks(leader.chain, call.fingerprint) - leader.prediction.matched
    if spared * BLOCK_TOKENS / rate < SHARED_MIN_SECONDS:
        return
    ahead_seconds = estimate.queued_tokens(loop.time()) / rate
    prefilled: asyncio.Future[None] = loop.create_future()
    leader.on_prefilled.append(lambda: None if prefilled.done() else prefilled.set_result(None))
    await asyncio.wait([prefilled], timeout=max(0.0, min(WAIT_FACTOR_MAX * ahead_seconds, deadline - loop.time())))
