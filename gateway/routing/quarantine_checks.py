"""Quarantine of requests that crash engines: such a request is not retried until no deployment is left.

If a deployment crashes, one of the calls in flight there may be the cause, whether or not its response had begun. If
only one call was in flight, counting the calls of all peer gateways, that request is blocked from then on. If there
were several, each of them gets one strike: it may be retried once, and is blocked if it is in flight at another crash.
A request that completes loses its strikes. Right after a cut, a health check distinguishes a crash from a broken
connection.
"""

from __future__ import annotations

import asyncio

import xxhash

from gateway.core.errors import QuarantinedRequest
from gateway.deployments.fleet import DeploymentState
from gateway.deployments.quarantine import STRIKES_TO_BLOCK, Quarantine
from gateway.types import Call


async def record_cut_answer(quarantine: Quarantine, deployment: DeploymentState, call: Call) -> bool:
    """Record a cut response (`DeploymentState.record_cut`).

    True if the deployment crashed and the request is now blocked.
    """
    _, in_flight = deployment.last_cut
    if await deployment.provider.healthy():
        return False
    now, digest = asyncio.get_running_loop().time(), _digest(call)
    quarantine.add_strikes(digest, STRIKES_TO_BLOCK if in_flight == 1 else 1, now)
    return quarantine.is_blocked(digest, now)


def clear_after_completion(quarantine: Quarantine, call: Call) -> None:
    """Remove the request's strikes. Free while no deployment has crashed."""
    if quarantine:
        quarantine.clear(_digest(call))


def raise_if_quarantined(quarantine: Quarantine, call: Call, now: float) -> None:
    """Raise `QuarantinedRequest` if the request is blocked. Free while no deployment has crashed."""
    if quarantine and quarantine.is_blocked(_digest(call), now):
        raise QuarantinedRequest(
            "a deployment crashed while processing this request, so it is not retried on another one"
        )


def _digest(call: Call) -> int:
    """A hash of the tenant and of every field of the request."""
    digest = xxhash.xxh3_64(call.principal.tenant.name.encode())
    for name in sorted(call.fields):
        digest.update(name.encode())
        digest.update(bytes(call.fields[name]))
    return digest.intdigest()
