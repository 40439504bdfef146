"""Forecasts of a month: linearly, and by the weekdays of the last four weeks."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.forecast import forecast_costs, forecast_month
from gateway.types import Receipt
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain

DAY = timedelta(days=1)
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)  # a Monday, half of November but a day is left: 15.5 of 30 days passed


def test_both_forecasts_of_a_steady_cost_are_the_mean_day_times_the_days() -> None:
    costs = {NOON.date() - ahead * DAY: Decimal(2) for ahead in range(1, 60)} | {NOON.date(): Decimal(1)}
    assert forecast_costs(costs, NOON) == (Decimal(31), Decimal(60), Decimal(60))


def test_a_free_weekend_is_expected_by_weekday_only() -> None:
    costs = {day: Decimal(10) for ahead in range(60) if (day := NOON.date() - ahead * DAY).weekday() < 5}
    costs[NOON.date()] = Decimal(5)
    spent, linear, by_weekday = forecast_costs(costs, NOON)
    assert spent == 105  # ten working days and a half
    assert linear == Decimal("203.225806")
    assert by_weekday == 210  # 21 working days


def test_a_new_tenant_is_not_taken_for_one_that_spends_little() -> None:
    week = {NOON.date() - ahead * DAY: Decimal(7) for ahead in range(1, 8)}
    assert forecast_costs(week, NOON)[2] == 49 + Decimal("14.5") * 7
    six_days = {day: cost for day, cost in week.items() if day > NOON.date() - 7 * DAY}
    assert forecast_costs(six_days, NOON)[2] is None


def test_at_the_first_minute_of_a_month_only_the_weekdays_are_known() -> None:
    costs = {date(2026, 10, day): Decimal(3) for day in range(1, 32)}
    assert forecast_costs(costs, datetime(2026, 11, 1, tzinfo=UTC)) == (Decimal(0), None, Decimal(90))


@given(st.lists(st.decimals(0, 1000, places=6), min_size=40, max_size=40), st.integers(0, 1439))
def test_no_forecast_is_below_what_was_spent(costs: list[Decimal], minute: int) -> None:
    now = datetime(2026, 11, 10, tzinfo=UTC) + timedelta(minutes=minute)
    by_day = {now.date() - ahead * DAY: cost for ahead, cost in enumerate(costs)}
    spent, linear, by_weekday = forecast_costs(by_day, now)
    assert spent == sum(costs[:10])
    assert linear is not None and linear >= spent
    assert by_weekday is None or by_weekday >= spent


def test_the_ledger_is_grouped_and_other_months_only_teach(tmp_path: Path) -> None:
    def receipt(day: date, tenant: str, cost: str) -> Receipt:
        when = f"{day.isoformat()}T01:00:00.000000Z"
        return a_receipt(tenant=tenant, started=when, finished=when, cost=cost)

    days = [date(2026, 10, 25) + ahead * DAY for ahead in range(22)]
    rows = [receipt(day, tenant, cost) for day in days for tenant, cost in (("a", "1"), ("b", "2"))]
    write_chain(tmp_path / "replica", rows)
    found = {each.group["tenant"]: each for each in forecast_month(tmp_path, now=NOON)}
    assert (found["a"].spent, found["a"].by_weekday) == (Decimal(15), Decimal("29.5"))
    assert (found["b"].spent, found["b"].by_weekday, found["b"].currency) == (Decimal(30), Decimal(59), "USD")
    (only,) = forecast_month(tmp_path, now=NOON, by=("model",), only={"tenant": ["a"]})
    assert (only.group, only.spent) == ({"model": "gpt-4o"}, Decimal(15))
