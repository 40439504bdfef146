"""Delays a call whose prefix is being computed for another call, so that a burst computes it once.

An engine reuses blocks that it has computed, but not blocks that it is computing. Calls of a burst with one prefix
would all compute it if they were sent at once. So the first call is sent, and the others wait for its first chunk. The
wait ends at the latest after `WAIT_FACTOR_MAX` times the predicted time of that prefill. Prompts that are sent to the
deployment meanwhile are computed before these calls, so the router counts by how much each of them delays these. For
the same reason no call waits if much more is queued than it shares: it is sent at once, and queues behind the first
call, so the prefix is mostly computed before the engine begins with it.

A call that will load its prefix from another deployment (`block_source.py`) waits in the same way, if that one is still
computing it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from gateway.deployments.state import DeploymentState
from gateway.prefix.cache_runs import shared_blocks
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.in_flight import InFlightPrompt
from gateway.prefix.working_set import RoutedPrompt
from gateway.types import Call

SHARED_MIN_SECONDS = 0.1  # of prefill that waiting must save
WAIT_FACTOR_MAX = 2.0  # times the predicted time of the queued prefills
QUEUED_FACTOR_MAX = 2.0  # times what waiting saves: if more is queued, the wait costs more than it saves


class SharedPrefill(NamedTuple):
    """A queued prompt that computes what another call needs too, and how long that call should wait for it at most."""

    prompt: InFlightPrompt
    wait_seconds: float


def find_shared_prefill(call: RoutedPrompt, deployment: DeploymentState, now: float) -> SharedPrefill | None:
    """The prefill that the call should wait for before it is sent to this deployment. None if it should not wait."""
    estimate = deployment.estimate
    rate = estimate.prefill_tokens_per_second
    min_tokens = SHARED_MIN_SECONDS * rate
    if estimate.queue.tokens < min_tokens or call.prompt_tokens_estimate < min_tokens:
        return None
    shared = estimate.queue.find_shared(call.fingerprint, min_tokens)
    if shared is None:
        return None
    saved_blocks = shared_blocks(shared.chain, call.fingerprint) - shared.prediction.matched
    saved_tokens, queued_tokens = saved_blocks * BLOCK_TOKENS, estimate.queued_tokens(now)
    if saved_tokens < min_tokens or queued_tokens > QUEUED_FACTOR_MAX * saved_tokens:
        return None
    return SharedPrefill(shared, WAIT_FACTOR_MAX * queued_tokens / rate)


def find_source_prefill(call: RoutedPrompt, source: DeploymentState, now: float) -> SharedPrefill | None:
    """The prefill of what the call will load from this other deployment. None if that has computed it."""
    queue = source.estimate.queue
    shared = queue.find_shared(call.fingerprint) if queue.tokens else None
    return None if shared is None else SharedPrefill(shared, WAIT_FACTOR_MAX * queue.seconds_until(shared, now))


async def wait_for_shared_prefill(
    call: Call, deployment: DeploymentState, deadline: float, source: DeploymentState | None = None
) -> None:
    """Wait while the deployment, or the source of its blocks, computes a prefix that this call needs too.

    `deadline` is in event-loop seconds.
    """
    loop = asyncio.get_running_loop()
    shared = find_source_prefill(call, source, loop.time()) if source is not None else None
    if shared is None:
        shared = find_shared_prefill(call, deployment, loop.time())
    if shared is None:
        return
    prefilled: asyncio.Future[None] = loop.create_future()
    shared.prompt.on_prefilled.append(lambda: None if prefilled.done() else prefilled.set_result(None))
    deployment.estimate.waiting_for_prefix += 1
    try:
        await asyncio.wait([prefilled], timeout=max(0.0, min(shared.wait_seconds, deadline - loop.time())))
    finally:
        deployment.estimate.waiting_for_prefix -= 1
