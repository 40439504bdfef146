from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache

from gateway.errors import BudgetSpent, GatewayError, LimitReached
from gateway.limits.base import Estimate, charge_key
from gateway.storage.base import MAX_AMOUNT, Charge, Refused, SpendCharge
from gateway.types import Call, Usage

MINUTE_SECONDS = 60
DAY_SECONDS = 86_400.0
# How an account's period is named in its key, and how long the account outlives its last change: the period and more.
PERIODS = {"day": ("%Y-%m-%d", 2 * DAY_SECONDS), "month": ("%Y-%m", 62 * DAY_SECONDS), "total": ("total", math.inf)}


class Budget:
    """Money per calendar period, UTC. A call belongs to the period in which it was admitted."""

    def charge(self, call: Call, estimate: Estimate) -> SpendCharge | None:
        budget = call.principal.tenant.limits.budget
        if budget is None:
            return None
        period = _period(budget.per, int(estimate.now // MINUTE_SECONDS))
        keep_seconds = PERIODS[budget.per][1]
        return SpendCharge(
            charge_key(call.principal.tenant.name, f"budget/{period}"),
            estimate.cost_nanos,
            _nanos(budget.amount),
            keep_seconds,
        )

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        return cost_nanos

    def refuse(self, call: Call, charge: Charge, refused: Refused) -> GatewayError:
        assert isinstance(charge, SpendCharge)
        budget = call.principal.tenant.limits.budget
        assert budget is not None
        per = "in total" if budget.per == "total" else f"per {budget.per}"
        left = f"tenant {call.principal.tenant.name} may spend {budget.amount:f} {per}; {_money(refused.remaining)} is "
        needed = f"and this request may cost {_money(charge.amount)}"
        if refused.retry_after_seconds is None:
            return BudgetSpent(f"{left}left, {needed}")
        return LimitReached(
            f"{left}neither spent nor held by calls in flight, {needed}",
            retry_after_seconds=refused.retry_after_seconds,
        )

    def headers(self, charge: Charge, remaining: int) -> dict[str, str]:
        return {}


@lru_cache(maxsize=16)
def _period(per: str, minute: int) -> str:
    """The period's name in the account's key; periods change on full minutes."""
    return datetime.fromtimestamp(minute * MINUTE_SECONDS, UTC).strftime(PERIODS[per][0])


@lru_cache(maxsize=10_000)
def _nanos(amount: Decimal) -> int:
    return min(int(amount.scaleb(9)), MAX_AMOUNT)


def _money(nanos: int) -> str:
    return f"{Decimal(nanos).scaleb(-9).normalize():f}"
