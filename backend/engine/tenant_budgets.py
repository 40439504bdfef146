"""How much CPU time the grammars of each tenant (cache salt) may take: a leaky bucket each."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

BURST_SECONDS = 30.0  # of CPU time in slow calls, as grammar_process.py defines them
REFILL_PER_SECOND = 0.1
MAX_TENANTS = 1024  # the one that was charged least recently is forgotten first


class GrammarsExhausted(Exception):
    """The tenant's other grammars leave no room for this one; a later attempt may succeed."""


class TenantBudgets:
    """CPU time that the grammars of each tenant have taken lately. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # seconds, and when they were counted
        self._lock = threading.Lock()

    def charge(self, salt: str, seconds: float) -> None:
        """Counts CPU time that a tenant's grammar has taken."""
        if not seconds:
            return
        with self._lock:
            self._spent[salt] = (self._level(salt) + seconds, self._clock())
            self._spent.move_to_end(salt)
            if len(self._spent) > MAX_TENANTS:
                self._spent.popitem(last=False)

    def check(self, salt: str) -> None:
        """Raises GrammarsExhausted if a tenant has used up its budget."""
        with self._lock:
            spent = self._level(salt)
        if spent > BURST_SECONDS:
            raise GrammarsExhausted(
                f"your grammars took {spent:.0f} seconds of CPU time lately; they may take {BURST_SECONDS:g} at once "
                f"and {REFILL_PER_SECOND:g} per second"
            )

    def is_charged(self, salt: str) -> bool:
        """Whether a tenant's grammars have lately been slower than the budget refills."""
        with self._lock:
            return self._level(salt) > 0

    def _level(self, salt: str) -> float:
        spent, since = self._spent.get(salt, (0.0, 0.0))
        return max(0.0, spent - (self._clock() - since) * REFILL_PER_SECOND)
