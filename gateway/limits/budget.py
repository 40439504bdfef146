"""Budget: limit of money per calendar period. Each period has its own account in the storage."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

from gateway.core.errors import BudgetSpent, GatewayError, LimitReached
from gateway.limits.base import CallEstimate, Limit
from gateway.limits.scope import Scope
from gateway.policy import Budget as BudgetPolicy
from gateway.policy import Limits
from gateway.storage.base import MAX_AMOUNT, Rejection, SpendCharge
from gateway.types import Usage

MINUTE_SECONDS = 60
HOUR_SECONDS = 3_600.0
DAY_SECONDS = 24 * HOUR_SECONDS
# By the policy's `per`: the format of the period's name in the account's key, and how long the storage keeps the
# account after its last change, which is longer than the period.
PERIODS = {
    "hour": ("%Y-%m-%dT%H", 2 * HOUR_SECONDS),
    "day": ("%Y-%m-%d", 2 * DAY_SECONDS),
    "week": ("%G-W%V", 14 * DAY_SECONDS),
    "month": ("%Y-%m", 62 * DAY_SECONDS),
    "total": ("total", math.inf),
}
# The limit of a soft budget's account, which no spending reaches: 4.6 billion currency units.
SOFT_LIMIT_NANOS = 2**62


class BudgetLimit(Limit[SpendCharge]):
    """Limits the money spent per calendar period, in UTC. A call is charged to the period in which it was admitted.

    `amount_nanos` is the policy's amount. A soft budget's account has a limit that is not reached, so it only counts.
    """

    kind = "budget"

    @classmethod
    def from_policy(cls, limits: Limits, scope: Scope) -> BudgetLimit | None:
        return None if limits.budget is None else cls(scope, limits.budget)

    def __init__(self, scope: Scope, budget: BudgetPolicy) -> None:
        super().__init__(scope)
        self.cuts_streams = budget.cut_streams and not budget.soft
        self._keep_seconds = PERIODS[budget.per][1]
        self._budget = budget
        self.amount_nanos = min(int(budget.amount.scaleb(9)), MAX_AMOUNT)
        self._limit_nanos = SOFT_LIMIT_NANOS if budget.soft else self.amount_nanos
        self._key = scope.key("budget")
        self._minute, self._key_now = -1, ""  # the minute of the last charge, and its account's key

    def charge(self, estimate: CallEstimate) -> SpendCharge:
        return self.charge_for(estimate.cost_nanos, estimate.now)

    def charge_for(self, nanos: int, now: float) -> SpendCharge:
        """Return the charge of an amount to the period that contains `now` (seconds since the epoch)."""
        # Formatting the period's name costs more than the rest of a charge, so it is done once per minute.
        minute = int(now // MINUTE_SECONDS)
        if minute != self._minute:
            self._minute, self._key_now = minute, f"{self._key}/{_period(self._budget.per, minute)}"
        return SpendCharge(self._key_now, nanos, self._limit_nanos, self._keep_seconds)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return cost_nanos

    def rejection(self, charge: SpendCharge, rejected: Rejection) -> GatewayError:
        remaining = f"{self._allowance()}; {nanos_to_text(rejected.remaining)} is "
        needed = f"and this request may cost {nanos_to_text(charge.amount)}"
        if rejected.retry_after_seconds is None:
            return BudgetSpent(f"{remaining}left, {needed}")
        return LimitReached(
            f"{remaining}neither spent nor reserved by calls in flight, {needed}",
            retry_after_seconds=rejected.retry_after_seconds,
        )

    def stream_cut(self) -> BudgetSpent:
        """Return the error that ends a stream that costs more than the budget has left."""
        return BudgetSpent(f"{self._allowance()}; the budget is spent, so the answer ends here")

    def _allowance(self) -> str:
        per = "in total" if self._budget.per == "total" else f"per {self._budget.per}"
        return f"{self.scope} may spend {self._budget.amount:f} {per}"


def _period(per: str, minute: int) -> str:
    """Return the period's name in the account's key. Periods begin on full minutes, so `minute` is precise enough."""
    return datetime.fromtimestamp(minute * MINUTE_SECONDS, UTC).strftime(PERIODS[per][0])


def nanos_to_text(nanos: int) -> str:
    """Convert billionths of a currency unit to decimal text without trailing zeros."""
    return f"{Decimal(nanos).scaleb(-9).normalize():f}"
