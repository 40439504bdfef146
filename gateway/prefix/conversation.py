"""Conversations of the working set (`working_set.py`), and what they claim of a deployment's cache."""

from __future__ import annotations

from typing import NamedTuple

from gateway.prefix.estimate import Estimate


class Conversation:
    """A conversation at its home deployment. It claims `tokens` there, its length so far, for its next turn."""

    __slots__ = (
        "alive_share",
        "checkpoint",
        "held",
        "home",
        "is_overdue",
        "is_parked",
        "key",
        "last_used",
        "running",
        "started",
        "tenant",
        "tokens",
        "turns",
        "urgent",
    )

    def __init__(self, key: int, home: Estimate, started: float, tenant: str, *, urgent: bool) -> None:
        self.key = key
        self.tenant = tenant
        self.checkpoint: int | None = None  # a hash at 7/8 of its chain, to recognise it when its end was edited
        self.home = home
        self.started = started
        self.last_used = started
        self.tokens = 0
        self.turns = 0
        self.running = 0  # calls in flight
        self.held = False  # its next call waits, and it claims nothing until then
        self.is_overdue = False  # its next turn is, so it claims nothing
        self.is_parked = False  # it was idle for long, and claims nothing until its next call is admitted
        self.urgent = urgent
        self.alive_share = 1.0  # the probability that it has another turn, by how long it has been idle


class Occupancy(NamedTuple):
    """What the conversations at one deployment claim.

    Cached until one of them changes, because held calls ask often.
    """

    capacity_tokens: int  # of the cache, when this was computed
    claimed: dict[tuple[bool, str], int]  # tokens, by urgency and tenant; only of conversations that are not held

    def claimed_tokens(self, *, urgent_only: bool) -> int:
        return sum(tokens for (urgent, _), tokens in self.claimed.items() if urgent or not urgent_only)

    def runs(self, *, urgent: bool) -> bool:
        """Whether a conversation of this urgency runs here."""
        return any(is_urgent is urgent for is_urgent, _ in self.claimed)
