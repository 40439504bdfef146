"""Forecasts the cost of a month from the receipts until now: linearly, and by weekday.

  linear       the cost so far, divided by the part of the month that has passed
  by weekday   the cost so far, and for the rest of the month the mean cost of the same weekday in the last four weeks

All times are UTC. The forecast by weekday uses whole days only, from the first day with a cost on, so that a new tenant
is not taken for one that spends little. It needs a whole week of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from gateway.billing.ledger.reader import Period, SetAside, summarise

WEEKS = 4  # how far back the forecast by weekday looks
DAY = timedelta(days=1)
_DIGITS = Decimal("0.000001")


class Forecast(NamedTuple):
    """The cost of a group of calls in a month: so far, and as forecast for its end. `group` is that of `UsageLine`.

    `linear` is None in the first minute of the month, and `by_weekday` if no whole week is known.
    """

    group: dict[str, str | None]
    currency: str
    spent: Decimal
    linear: Decimal | None
    by_weekday: Decimal | None


def forecast_month(
    ledger: Path,
    *,
    now: datetime,
    by: Sequence[str] = ("tenant",),
    only: Mapping[str, Sequence[str]] | None = None,
    set_aside: SetAside = None,
) -> list[Forecast]:
    """Forecast the month that contains `now`, by dimensions that are no times. Raises `UnreadableLedger`."""
    now = now.astimezone(UTC)
    first = min(now.date().replace(day=1), now.date() - WEEKS * 7 * DAY)
    period = Period(first.isoformat(), now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"), only or {})
    days: dict[tuple[tuple[str | None, ...], str], dict[date, Decimal]] = {}
    for line in summarise(ledger, by=[*by, "day"], period=period, set_aside=set_aside):
        group, day = tuple(line.group[name] for name in by), date.fromisoformat(line.group["day"] or "")
        for currency, cost in line.cost.items():
            days.setdefault((group, currency), {})[day] = cost
    found = []
    for (group, currency), costs in days.items():
        spent, linear, by_weekday = forecast_costs(costs, now)
        found.append(Forecast(dict(zip(by, group, strict=True)), currency, spent, linear, by_weekday))
    return found


def forecast_costs(costs: Mapping[date, Decimal], now: datetime) -> tuple[Decimal, Decimal | None, Decimal | None]:
    """Return the cost of the month so far, and its two forecasts, from the cost of each day. Today's is incomplete."""
    today, month = now.date(), now.date().replace(day=1)
    end = (month + 31 * DAY).replace(day=1)
    spent = sum((cost for day, cost in costs.items() if month <= day <= today), Decimal(0))
    passed = Decimal((now - datetime(month.year, month.month, 1, tzinfo=UTC)) // timedelta(minutes=1))
    linear = (spent * (end - month).days * 1440 / passed).quantize(_DIGITS) if passed else None
    means = _weekday_means(costs, today)
    if means is None:
        return spent, linear, None
    left_today = Decimal(1440 - now.hour * 60 - now.minute) / 1440
    rest = means[today.weekday()] * left_today
    rest += sum((means[(today + ahead * DAY).weekday()] for ahead in range(1, (end - today).days)), Decimal(0))
    return spent, linear, (spent + rest).quantize(_DIGITS)


def _weekday_means(costs: Mapping[date, Decimal], today: date) -> list[Decimal] | None:
    """The mean cost of each weekday in the last whole days, Monday first. None without a whole week."""
    oldest = today - WEEKS * 7 * DAY
    first = max(oldest, min((day for day, cost in costs.items() if cost), default=today))
    if (today - first).days < 7:
        return None
    seen: list[list[Decimal]] = [[] for _ in range(7)]
    for ahead in range((today - first).days):
        day = first + ahead * DAY
        seen[day.weekday()].append(costs.get(day, Decimal(0)))
    return [sum(known, Decimal(0)) / len(known) for known in seen]
