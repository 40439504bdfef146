"""CPU time of grammars by tenant."""

from __future__ import annotations

import pytest

from backend.engine import tenant_budgets
from backend.engine.tenant_budgets import BURST_SECONDS, REFILL_PER_SECOND, GrammarsExhausted, TenantBudgets


def test_a_tenant_over_its_budget_is_refused_until_it_has_refilled() -> None:
    now = 100.0
    budgets = TenantBudgets(lambda: now)
    budgets.charge("one", BURST_SECONDS)
    budgets.check("one")
    budgets.charge("one", 1.0)
    with pytest.raises(GrammarsExhausted, match="31 seconds of CPU time lately"):
        budgets.check("one")
    budgets.check("other")
    now += 1.0 / REFILL_PER_SECOND
    budgets.check("one")


def test_the_number_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_budgets, "MAX_TENANTS", 3)
    budgets = TenantBudgets(lambda: 0.0)
    for i in range(10):
        budgets.charge(str(i), 1.0)
    assert list(budgets._spent) == ["7", "8", "9"]
