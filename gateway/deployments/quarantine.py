"""Requests that may have crashed a deployment: a hash of each, and its strikes.

`gateway/routing/quarantine_checks.py` decides when a request gets strikes. Changes are sent to the peer gateways, and
theirs are applied here (`replica_sync.py`), because a retried request may arrive at any of them.
"""

from __future__ import annotations

from collections import OrderedDict

ENTRIES_MAX = 1000
ENTRY_SECONDS = 600.0
STRIKES_TO_BLOCK = 2  # at which a request is refused
UPDATES_MAX = 100  # per message to peers, so per tenth of a second; no request can be the cause of more crashes


class Quarantine:
    """The quarantined requests. Bounded. `now` is in event-loop seconds; `digest` is the hash of a request."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[float, int]] = OrderedDict()  # by digest: expiry, strikes
        self._updates: dict[int, int] = {}  # by digest: strikes to send to peers, 0 after `clear`

    def __len__(self) -> int:
        return len(self._entries)

    def strikes(self, digest: int, now: float) -> int:
        """The request's strikes; 0 once they have expired."""
        until, strikes = self._entries.get(digest, (0.0, 0))
        return strikes if now < until else 0

    def is_blocked(self, digest: int, now: float) -> bool:
        """Whether the request must be refused."""
        return self.strikes(digest, now) >= STRIKES_TO_BLOCK

    def add_strikes(self, digest: int, added: int, now: float) -> None:
        """A deployment crashed while this request was in flight there."""
        strikes = self.strikes(digest, now) + added
        self._note(digest, strikes, now)
        if len(self._updates) < UPDATES_MAX:
            self._updates[digest] = strikes

    def clear(self, digest: int) -> None:
        """The request completed: remove its strikes."""
        if self._entries.pop(digest, None) is not None and len(self._updates) < UPDATES_MAX:
            self._updates[digest] = 0

    def receive(self, digest: int, strikes: int, now: float) -> None:
        """Apply a peer's update, which may be about the same crash: strikes are not added.

        Zero strikes clear the request.
        """
        if not strikes:
            self._entries.pop(digest, None)
            return
        self._note(digest, max(strikes, self.strikes(digest, now)), now)

    def take_updates(self) -> tuple[tuple[int, int], ...]:
        """The changes since the last call, as pairs of digest and strikes."""
        updates, self._updates = tuple(self._updates.items()), {}
        return updates

    def _note(self, digest: int, strikes: int, now: float) -> None:
        self._entries.pop(digest, None)
        self._entries[digest] = now + ENTRY_SECONDS, strikes
        while len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)
