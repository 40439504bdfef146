"""Requests that end the server that works on them: asked once, and not over and over until no server is left.

When a server dies, one of the calls that it worked on may be why. Where there was only one, it is refused from then
on; where there were several, those that it had not answered yet may be asked once more, and the one that is there again
when a server dies is refused. That a server has died, and not just a connection, its health says right afterwards.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

from gateway.errors import PoisonousRequest
from gateway.fleet import Server
from gateway.types import Call

SUSPECTS_MAX = 1000
SUSPECT_SECONDS = 600.0
SAME_DEATH_SECONDS = 5.0  # in which calls fail that one death has ended
CONVICTED = 2


class Suspects:
    """Bodies by their hash. On the way of a call that goes well, nothing happens here."""

    def __init__(self) -> None:
        self._deaths: dict[str, tuple[float, int]] = {}  # the newest, by server: when, and with how many under way
        self._suspects: OrderedDict[int, tuple[float, int]] = OrderedDict()  # until when, and how much is against it

    def died(self, server: Server, call: Call, under_way: int, now: float) -> None:
        """The server has died while it worked on this call, and on `under_way` ones in all."""
        when, most = self._deaths.get(server.name, (-SAME_DEATH_SECONDS, 0))
        most = max(under_way, most) if now - when < SAME_DEATH_SECONDS else under_way
        self._deaths[server.name] = (now, most)
        alone = most == 1 and now - server.cut_at > SAME_DEATH_SECONDS
        digest = _digest(call)
        _, against = self._suspects.pop(digest, (0.0, 0))
        self._suspects[digest] = (now + SUSPECT_SECONDS, against + (CONVICTED if alone else 1))
        while len(self._suspects) > SUSPECTS_MAX:
            self._suspects.popitem(last=False)

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
