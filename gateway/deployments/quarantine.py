"""Requests that may be why a server has died: by a hash of each, and with how much is against it.

What is new here is told to the other gateways on the same storage, and what they tell comes in (`replica_sync`): a
request that is asked again comes to any of them.
"""

from __future__ import annotations

from collections import OrderedDict

SUSPECTS_MAX = 1000
SUSPECT_SECONDS = 600.0
CONVICTED = 2
UNTOLD_MAX = 100  # in the tenth of a second between two tellings; more deaths than that are no request's fault


class Quarantine:
    """`now` is in event-loop seconds."""

    def __init__(self) -> None:
        self._against: OrderedDict[int, tuple[float, int]] = OrderedDict()  # until when, and how much
        self._untold: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._against)

    def against(self, digest: int, now: float) -> int:
        until, against = self._against.get(digest, (0.0, 0))
        return against if now < until else 0

    def convicted(self, digest: int, now: float) -> bool:
        return self.against(digest, now) >= CONVICTED

    def accuse(self, digest: int, weight: int, now: float) -> None:
        """A server has died while it worked on it."""
        against = self.against(digest, now) + weight
        self._note(digest, against, now)
        if len(self._untold) < UNTOLD_MAX:
            self._untold[digest] = against

    def acquit(self, digest: int) -> None:
        """A server has answered it to the end, and lives."""
        if self._against.pop(digest, None) is not None and len(self._untold) < UNTOLD_MAX:
            self._untold[digest] = 0

    def hear(self, digest: int, against: int, now: float) -> None:
        """From another gateway, which may speak of the same death; with nothing against it, that it was acquitted."""
        if not against:
            self._against.pop(digest, None)
            return
        self._note(digest, max(against, self.against(digest, now)), now)

    def tell(self) -> tuple[tuple[int, int], ...]:
        """What is new since the last time."""
        told, self._untold = tuple(self._untold.items()), {}
        return told

    def _note(self, digest: int, against: int, now: float) -> None:
        self._against.pop(digest, None)
        self._against[digest] = now + SUSPECT_SECONDS, against
        while len(self._against) > SUSPECTS_MAX:
            self._against.popitem(last=False)
