"""How much of a budget will be spent at the end of its period, and the event that says so."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.limits.budget_forecast import forecast_share, passed_share
from tests.gateway.limits.test_budget_warnings import Bench


@pytest.mark.parametrize(
    ("period", "now", "passed"),
    [
        ("2026-11", "2026-11-16T00:00:00", 0.5),
        ("2026-02", "2026-02-15T00:00:00", 0.5),
        ("2026-W48", "2026-11-26T12:00:00", 0.5),  # from Monday the 23rd on
        ("2026-11-20", "2026-11-20T06:00:00", 0.25),
        ("2026-11-20T10", "2026-11-20T10:45:00", 0.75),
        ("2026-10", "2026-11-16T00:00:00", 1.0),
    ],
)
def test_the_passed_part_of_each_kind_of_period(period: str, now: str, passed: float) -> None:
    assert passed_share(period, datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()) == passed


def test_a_budget_without_periods_has_no_forecast() -> None:
    assert passed_share("total", 0.0) is None
    assert forecast_share(0.5, None) is None
    assert forecast_share(0.05, 0.05) is None, "too little has passed"
    assert forecast_share(0.5, 0.25) == 2.0


async def test_a_budget_that_is_forecast_to_be_spent_is_one_event_and_a_gauge(tmp_path: Path) -> None:
    bench = Bench(tmp_path, forecast_at=1.0)
    bench.now = datetime(2026, 11, 7, 12, tzinfo=UTC).timestamp()
    await bench.spend(2_000_000_000)  # of 10, after 6.5 of 30 days: 9.2 at the end
    await bench.round()
    assert bench.receiver.got == []
    await bench.spend(1_000_000_000)
    for _ in range(2):
        await bench.warnings.check()
        await bench.warnings.send_due()
    (event,) = [body for _, body in bench.receiver.got if body["type"] == "budget.forecast"]
    assert (event["data"]["tenant"], event["data"]["period"], event["data"]["left"]) == ("t", "2026-11", "7")
    assert event["data"]["forecast"] == pytest.approx(3 * 30 / 6.5, abs=1e-5)
    assert [*bench.warnings.forecast.values()] == [pytest.approx(0.3 * 30 / 6.5)]
