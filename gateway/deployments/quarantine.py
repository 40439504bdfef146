"""Requests that may be why a server has died: by a hash of each, and with how much is against it.

What is new here is told to the other gateways on the same storage, and what they tell comes in (`replica_sync`): a
request that is asked again comes to any of them.
"""

from __future__ import annotations

from collections import OrderedDict

ENTRIES_MAX = 1000
ENTRY_SECONDS = 600.0
STRIKES_TO_BLOCK = 2
UPDATES_MAX = 100  # in the tenth of a second between two tellings; more deaths than that are no request's fault


class Quarantine:
    """`now` is in event-loop seconds."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[float, int]] = OrderedDict()  # until when, and how much
        self._updates: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def strikes(self, digest: int, now: float) -> int:
        until, strikes = self._entries.get(digest, (0.0, 0))
        return strikes if now < until else 0

    def is_blocked(self, digest: int, now: float) -> bool:
        return self.strikes(digest, now) >= STRIKES_TO_BLOCK

    def add_strikes(self, digest: int, added: int, now: float) -> None:
        """A server has died while it worked on it."""
        strikes = self.strikes(digest, now) + added
        self._note(digest, strikes, now)
        if len(self._updates) < UPDATES_MAX:
            self._updates[digest] = strikes

    def clear(self, digest: int) -> None:
        """A server has answered it to the end, and lives."""
        if self._entries.pop(digest, None) is not None and len(self._updates) < UPDATES_MAX:
            self._updates[digest] = 0

    def receive(self, digest: int, strikes: int, now: float) -> None:
        """From another gateway, which may speak of the same death; with nothing against it, that it was acquitted."""
        if not strikes:
            self._entries.pop(digest, None)
            return
        self._note(digest, max(strikes, self.strikes(digest, now)), now)

    def take_updates(self) -> tuple[tuple[int, int], ...]:
        """What is new since the last time."""
        told, self._updates = tuple(self._updates.items()), {}
        return told

    def _note(self, digest: int, strikes: int, now: float) -> None:
        self._entries.pop(digest, None)
        self._entries[digest] = now + ENTRY_SECONDS, strikes
        while len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)
