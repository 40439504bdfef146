"""The retry budget: bounds retries to a share of the traffic, for the fleet as a whole.

If single deployments fail, retries save calls. If all of them fail, retries multiply the load that made them fail. So
each call adds a fraction of a retry to the budget, and each retry takes a whole one. The budget holds
`BUDGET_MAX_RETRIES` at most and refills slowly by itself, so that a gateway with little traffic may retry, too.
"""

from __future__ import annotations

import random

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_MAX_SECONDS = 4.0
BUDGET_MAX_RETRIES = 50.0
BUDGET_REFILL_PER_SECOND = 1.0  # retries, in addition to the calls' share


class RetryBudget:
    """Retries that one latency class may still make. First attempts are never held back."""

    def __init__(self) -> None:
        self._budget = BUDGET_MAX_RETRIES
        self._filled_at = 0.0
        self.refused = 0  # retries not made because the budget was empty

    def note_call(self, share: float) -> None:
        """A call arrived: add `share` of a retry to the budget."""
        budget = self._budget + share
        self._budget = budget if budget < BUDGET_MAX_RETRIES else BUDGET_MAX_RETRIES

    def take(self, now: float) -> bool:
        """Take one retry from the budget. False if none is left. `now` is in event-loop seconds."""
        if now > self._filled_at:
            self._budget = min(self._budget + (now - self._filled_at) * BUDGET_REFILL_PER_SECOND, BUDGET_MAX_RETRIES)
            self._filled_at = now
        if self._budget < 1.0:
            self.refused += 1
            return False
        self._budget -= 1.0
        return True


def backoff_seconds(rounds: int) -> float:
    """Seconds to wait before the same deployments are tried again.

    Exponential; half of it is random, to spread callers.
    """
    longest = min(BACKOFF_FIRST_SECONDS * (1 << min(rounds, 10)), BACKOFF_MAX_SECONDS)
    return longest * (0.5 + 0.5 * random.random())
