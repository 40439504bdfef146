"""How often the fleet as a whole is asked again: a share of the traffic, not a count per call.

When servers fail one by one, retries save calls; when all of them fail, retries multiply the load that made them
fail. So every call brings a fraction of a retry into a common pot, and every retry takes a whole one out. The pot
holds a few at any time, so that a quiet gateway may retry too.
"""

from __future__ import annotations

import random

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_MAX_SECONDS = 4.0
BUDGET_MAX_RETRIES = 50.0
BUDGET_REFILL_PER_SECOND = 1.0  # besides what calls bring


class RetryBudget:
    """The pot. `share` of calls may be tried once more; first attempts are never held back."""

    def __init__(self) -> None:
        self._budget = BUDGET_MAX_RETRIES
        self._filled_at = 0.0
        self.refused = 0  # retries that there was nothing left for

    def note_call(self, share: float) -> None:
        pot = self._budget + share
        self._budget = pot if pot < BUDGET_MAX_RETRIES else BUDGET_MAX_RETRIES

    def take(self, now: float) -> bool:
        """Whether one more attempt may be made."""
        if now > self._filled_at:
            self._budget = min(self._budget + (now - self._filled_at) * BUDGET_REFILL_PER_SECOND, BUDGET_MAX_RETRIES)
            self._filled_at = now
        if self._budget < 1.0:
            self.refused += 1
            return False
        self._budget -= 1.0
        return True


def backoff_seconds(rounds: int) -> float:
    """Before asking the same servers again: doubling, with half of it left to chance, so that callers spread."""
    longest = min(BACKOFF_FIRST_SECONDS * (1 << min(rounds, 10)), BACKOFF_MAX_SECONDS)
    return longest * (0.5 + 0.5 * random.random())
