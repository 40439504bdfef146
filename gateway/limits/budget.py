from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

from gateway.core.errors import BudgetSpent, GatewayError, LimitReached
from gateway.limits.base import Estimate, Limit
from gateway.limits.scope import Scope
from gateway.policy import Budget as BudgetOfPolicy
from gateway.policy import Limits
from gateway.storage.base import MAX_AMOUNT, Rejection, SpendCharge
from gateway.types import Usage

MINUTE_SECONDS = 60
HOUR_SECONDS = 3_600.0
DAY_SECONDS = 24 * HOUR_SECONDS
# How an account's period is named in its key, and how long the account outlives its last change: the period and more.
PERIODS = {
    "hour": ("%Y-%m-%dT%H", 2 * HOUR_SECONDS),
    "day": ("%Y-%m-%d", 2 * DAY_SECONDS),
    "week": ("%G-W%V", 14 * DAY_SECONDS),
    "month": ("%Y-%m", 62 * DAY_SECONDS),
    "total": ("total", math.inf),
}


class Budget(Limit[SpendCharge]):
    """Money per calendar period, UTC. A call belongs to the period in which it was admitted."""

    kind = "budget"

    @classmethod
    def of(cls, limits: Limits, scope: Scope) -> Budget | None:
        return None if limits.budget is None else cls(scope, limits.budget)

    def __init__(self, scope: Scope, budget: BudgetOfPolicy) -> None:
        super().__init__(scope)
        self.cuts_streams = budget.cut_streams
        self._keep_seconds = PERIODS[budget.per][1]
        self._budget = budget
        self._limit_nanos = min(int(budget.amount.scaleb(9)), MAX_AMOUNT)
        self._key = scope.key("budget")
        self._minute, self._key_now = -1, ""  # of the account that is charged now

    def charge(self, estimate: Estimate) -> SpendCharge:
        return self.charge_for(estimate.cost_nanos, estimate.now)

    def charge_for(self, nanos: int, now: float) -> SpendCharge:
        minute = int(now // MINUTE_SECONDS)
        if minute != self._minute:
            self._minute, self._key_now = minute, f"{self._key}/{_period(self._budget.per, minute)}"
        return SpendCharge(self._key_now, nanos, self._limit_nanos, self._keep_seconds)

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return cost_nanos

    def refuse(self, charge: SpendCharge, refused: Rejection) -> GatewayError:
        left = f"{self._words()}; {nanos_text(refused.remaining)} is "
        needed = f"and this request may cost {nanos_text(charge.amount)}"
        if refused.retry_after_seconds is None:
            return BudgetSpent(f"{left}left, {needed}")
        return LimitReached(
            f"{left}neither spent nor held by calls in flight, {needed}",
            retry_after_seconds=refused.retry_after_seconds,
        )

    def cut(self) -> BudgetSpent:
        """Of a stream that costs more than is left."""
        return BudgetSpent(f"{self._words()}; all of it is spent, so the answer ends here")

    def _words(self) -> str:
        per = "in total" if self._budget.per == "total" else f"per {self._budget.per}"
        return f"{self.scope} may spend {self._budget.amount:f} {per}"


def _period(per: str, minute: int) -> str:
    """The period's name in the account's key; periods change on full minutes."""
    return datetime.fromtimestamp(minute * MINUTE_SECONDS, UTC).strftime(PERIODS[per][0])


def nanos_text(nanos: int) -> str:
    return f"{Decimal(nanos).scaleb(-9).normalize():f}"
