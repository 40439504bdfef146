"""Requests that end the server that works on them: asked once, and not over and over until no server is left.

When a server dies, one of the calls that it worked on may be why, whether its answer had begun or not. Where there was
only one, it is refused from then on; where there were several, they may be asked once more, and the one that is there
again when a server dies is refused. That a server has died, and not just a connection, its health says right after.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import xxhash

from gateway.errors import PoisonousRequest
from gateway.fleet import Server
from gateway.types import Call

SUSPECTS_MAX = 1000
SUSPECT_SECONDS = 600.0
CONVICTED = 2


class Suspects:
    """Bodies by their hash. On the way of a call that goes well, nothing happens here."""

    def __init__(self) -> None:
        self._suspects: OrderedDict[int, tuple[float, int]] = OrderedDict()  # until when, and how much is against it

    async def after_cut(self, server: Server, call: Call) -> bool:
        """The call's answer has broken off (`Server.note_cut`). True where the server has died, and of this call."""
        _, under_way = server.last_cut
        if await server.provider.healthy():
            return False
        now, digest = asyncio.get_running_loop().time(), _digest(call)
        _, against = self._suspects.pop(digest, (0.0, 0))
        against += CONVICTED if under_way == 1 else 1
        self._suspects[digest] = (now + SUSPECT_SECONDS, against)
        while len(self._suspects) > SUSPECTS_MAX:
            self._suspects.popitem(last=False)
        return against >= CONVICTED

    def check(self, call: Call, now: float) -> None:
        """Raises `PoisonousRequest`."""
        if not self._suspects:
            return
        until, against = self._suspects.get(_digest(call), (0.0, 0))
        if against >= CONVICTED and now < until:
            raise PoisonousRequest("a server has died of this very request; it is not sent to another one")


def _digest(call: Call) -> int:
    digest = xxhash.xxh3_64(call.principal.tenant.name.encode())
    for name in sorted(call.fields):
        digest.update(name.encode())
        digest.update(bytes(call.fields[name]))
    return digest.intdigest()
