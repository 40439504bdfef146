"""Requests that end the server that works on them: asked once, and not over and over until no server is left.

When a server dies, one of the calls that it worked on may be why, whether its answer had begun or not. Where there was
only one, of all gateways as far as they tell each other, it is refused from then on; where there were several, they may
be asked once more, and the one that is there again when a server dies is refused. Of one that is answered to its end
in between, nothing is held against it any more. That a server has died, and not just a connection, its health says
right after.
"""

from __future__ import annotations

import asyncio

import xxhash

from gateway.core.errors import QuarantinedRequest
from gateway.deployments.fleet import DeploymentState
from gateway.deployments.quarantine import BLOCK_SCORE, Quarantine
from gateway.types import Call


async def record_cut_answer(quarantine: Quarantine, deployment: DeploymentState, call: Call) -> bool:
    """The call's answer was cut (`DeploymentState.note_cut`). True if the deployment died because of this call."""
    _, under_way = deployment.last_cut
    if await deployment.provider.healthy():
        return False
    now, digest = asyncio.get_running_loop().time(), _digest(call)
    quarantine.suspect(digest, BLOCK_SCORE if under_way == 1 else 1, now)
    return quarantine.is_blocked(digest, now)


def clear_after_completion(quarantine: Quarantine, call: Call) -> None:
    """Its answer has come to its own end. While no server has died, nothing happens here either."""
    if quarantine:
        quarantine.clear(_digest(call))


def raise_if_quarantined(quarantine: Quarantine, call: Call, now: float) -> None:
    """Raises `QuarantinedRequest`. On the way of a call while no server has died, nothing happens here."""
    if quarantine and quarantine.is_blocked(_digest(call), now):
        raise QuarantinedRequest("a server has died of this very request; it is not sent to another one")


def _digest(call: Call) -> int:
    digest = xxhash.xxh3_64(call.principal.tenant.name.encode())
    for name in sorted(call.fields):
        digest.update(name.encode())
        digest.update(bytes(call.fields[name]))
    return digest.intdigest()
