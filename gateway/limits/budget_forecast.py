"""Forecasts the spend of a budget at the end of its period, linearly: the spend so far by the part that has passed.

`warmpath usage forecast` also forecasts by weekday, from the ledger.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

PASSED_MIN = 0.1  # of the period; before, the forecast says little
_DAY = timedelta(days=1)
# By the length of a period's name.
_FORMATS = {7: "%Y-%m", 8: "%G-W%V", 10: "%Y-%m-%d", 13: "%Y-%m-%dT%H"}
_LENGTHS = {8: 7 * _DAY, 10: _DAY, 13: _DAY / 24}


def passed_share(period: str, now: float) -> float | None:
    """Return how much of a budget's period has passed. `now` is in seconds since the epoch.

    `period` is its name, as in 2026-11 (`gateway.limits.budget`). None for a budget without periods.
    """
    if period == "total":
        return None
    written = _FORMATS[len(period)]
    text, written = (f"{period}-1", f"{written}-%u") if "W" in period else (period, written)
    begin = datetime.strptime(text, written).replace(tzinfo=UTC)
    end = (begin + 31 * _DAY).replace(day=1) if written == "%Y-%m" else begin + _LENGTHS[len(period)]
    return min(max((datetime.fromtimestamp(now, UTC) - begin) / (end - begin), 0.0), 1.0)


def forecast_share(share: float, passed: float | None) -> float | None:
    """Return the share of a budget that will be spent at the end of its period. None if too little has passed."""
    return None if passed is None or passed < PASSED_MIN else share / passed
