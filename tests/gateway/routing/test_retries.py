"""The retry budget and the backoff between rounds."""

from __future__ import annotations

import pytest

from gateway.routing import retries
from gateway.routing.retries import BUDGET_MAX_RETRIES, RetryBudget, RetryBudgets, backoff_seconds


def test_the_budget_is_a_share_of_the_calls() -> None:
    budget = RetryBudget()
    taken = 0
    while budget.take(0.0):
        taken += 1
    assert taken == BUDGET_MAX_RETRIES
    for _ in range(100):
        budget.note_call(0.2)
    for _ in range(20):
        taken -= budget.take(0.0)
    assert BUDGET_MAX_RETRIES - taken in (19, 20)
    assert not budget.take(0.0)


def test_one_tenants_retries_do_not_use_up_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BUDGETS_MAX", 2)
    budgets = RetryBudgets()
    spent = budgets.of("noisy", "realtime")
    while spent.take(0.0):
        pass
    assert budgets.of("noisy", "realtime") is spent
    assert budgets.of("quiet", "realtime").take(0.0)
    assert budgets.of("quiet", "batch").take(0.0), "each class has its own"
    assert budgets.of("noisy", "realtime") is not spent, "bounded: the one that was unused longest is dropped"


def test_backoff_grows_and_is_randomised() -> None:
    pauses = [[backoff_seconds(rounds) for _ in range(20)] for rounds in range(8)]
    assert max(pauses[0]) <= 0.25 and min(pauses[7]) >= 2.0 and max(pauses[7]) <= 4.0
    assert len(set(pauses[3])) > 1
