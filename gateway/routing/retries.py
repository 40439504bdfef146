"""The retry budgets: bound retries to a share of the traffic, for each tenant and latency class.

If some deployments fail, a retry on another one answers the call. If all of them fail, retries multiply the load that
made them fail. So each call adds a fraction of a retry to its budget, and each retry takes a whole one. A budget holds
`BUDGET_MAX_RETRIES` at most and refills slowly by itself, so that a gateway with little traffic may retry, too. Each
tenant has its own budgets, so that one tenant's failing requests do not use up the retries of the others.
"""

from __future__ import annotations

import random
from collections import OrderedDict

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_MAX_SECONDS = 4.0
BUDGET_MAX_RETRIES = 50.0
BUDGET_REFILL_PER_SECOND = 1.0  # retries, in addition to the calls' share
BUDGETS_MAX = 10_000  # pairs of tenant and class; beyond, the budget that was unused longest starts again


class RetryBudget:
    """Retries that one tenant's calls of one latency class may still make. First attempts are never held back."""

    def __init__(self) -> None:
        self._budget = BUDGET_MAX_RETRIES
        self._filled_at = 0.0

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
            return False
        self._budget -= 1.0
        return True


class RetryBudgets:
    """The budgets of all tenants and classes. Owned by the event loop."""

    def __init__(self) -> None:
        self._budgets: OrderedDict[tuple[str, str], RetryBudget] = OrderedDict()
        self.refused = 0  # retries not made because a budget was empty

    def of(self, tenant: str, latency_class: str) -> RetryBudget:
        """The budget of a tenant's calls of a class."""
        name = tenant, latency_class
        budget = self._budgets.get(name)
        if budget is None:
            budget = self._budgets[name] = RetryBudget()
            if len(self._budgets) > BUDGETS_MAX:
                self._budgets.popitem(last=False)
        else:
            self._budgets.move_to_end(name)
        return budget


def backoff_seconds(rounds: int) -> float:
    """Seconds to wait before the same deployments are tried again.

    Exponential; half of it is random, to spread callers.
    """
    longest = min(BACKOFF_FIRST_SECONDS * (1 << min(rounds, 10)), BACKOFF_MAX_SECONDS)
    return longest * (0.5 + 0.5 * random.random())
