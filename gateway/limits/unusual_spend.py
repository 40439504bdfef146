"""Finds hours in which a budget is spent unusually fast, compared with its own learned pattern.

The rule: the spend of an hour (UTC) is unusual if it is above `factor` times the usual one, and at least a minimum
amount. The usual spend is the greater of two means: that of the same hour of the day, and that of all hours. Both are
weighted exponentially, with `DAY_WEIGHT` and `HOUR_WEIGHT` for the newest hour. An account of which fewer than
`HOURS_MIN` whole hours have been seen has no pattern, so nothing of it is unusual. An unusual hour is learned as at
most `LEARNED_MAX` times the usual one, so that one mistake does not become the norm, and a lasting change does within
days.

Spend is what the storage has of a budget, so it includes all gateways, all tenants below, and what calls in flight have
reserved. The patterns are kept in a file, so that they survive a restart.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

HOUR_SECONDS = 3600
HOURS_MIN = 24
DAY_WEIGHT = 1 / 4  # of the newest day, for the mean of one hour of the day
HOUR_WEIGHT = 1 / 48  # of the newest hour, for the mean of all hours
LEARNED_MAX = 2.0  # times the usual spend, as which an hour is learned at most
ACCOUNTS_MAX = 20_000  # patterns in memory, about 1 kB each; further accounts have none

log = logging.getLogger(__name__)

Account = tuple[str, str]  # tenant and scope


class _Pattern(msgspec.Struct, array_like=True):
    """What is known of one account. Amounts are in units of its currency."""

    hours: int = 0  # whole hours seen
    mean: float = 0.0  # of all hours
    by_hour: list[float] = []  # of each hour of the day; empty before the first one


class _Now(msgspec.Struct):
    """The hour in progress of one account."""

    hour: int  # since the epoch
    period: str  # of the budget
    spent: float  # at the last look
    began: float  # `spent` at the beginning of the hour, or of the period if that is later
    before: float = 0.0  # spent in this hour in the period before
    whole: bool = False  # whether the hour was seen from its beginning


class HourOfSpend(NamedTuple):
    """The spend of an hour so far, and the usual one of that hour; None without a pattern."""

    hour: int  # since the epoch
    spent: float
    usual: float | None

    def is_unusual(self, factor: float, minimum: float) -> bool:
        """Whether the hour's spend is above `factor` times the usual, and at least `minimum`."""
        return self.usual is not None and self.spent >= minimum and self.spent > factor * self.usual


class SpendPatterns:
    """The patterns of all accounts. Not thread-safe."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._now: dict[Account, _Now] = {}
        self._patterns: dict[Account, _Pattern] | None = None  # read from the file at the first look
        self._changed = False

    def look(self, account: Account, period: str, spent: float, now: float) -> HourOfSpend:
        """Note what an account has spent in its budget's period, and return the hour so far. `now` is in seconds."""
        if self._patterns is None:
            self._patterns = self._read()
        hour = int(now // HOUR_SECONDS)
        seen = self._now.get(account)
        if seen is None and len(self._now) >= ACCOUNTS_MAX:
            return HourOfSpend(hour, 0.0, None)
        if seen is None or not seen.hour <= hour <= seen.hour + 1:  # the first look, or one after a pause
            self._now[account] = seen = _Now(hour, period, spent, spent)
        if hour > seen.hour:
            if seen.whole:
                self._learn(account, seen.hour, seen.before + max(0.0, seen.spent - seen.began))
            # What was spent since the last look belongs to the new hour, unless its period begins with it.
            seen.hour, seen.began, seen.before, seen.whole = hour, seen.spent, 0.0, True
        if period != seen.period:
            seen.before += max(0.0, seen.spent - seen.began)
            seen.period, seen.began = period, 0.0
        seen.spent = spent
        return HourOfSpend(hour, seen.before + max(0.0, spent - seen.began), self._usual(account, hour))

    def _usual(self, account: Account, hour: int) -> float | None:
        pattern = (self._patterns or {}).get(account)
        if pattern is None or pattern.hours < HOURS_MIN:
            return None
        return max(pattern.mean, pattern.by_hour[hour % 24])

    def _learn(self, account: Account, hour: int, spent: float) -> None:
        assert self._patterns is not None
        pattern = self._patterns.get(account)
        if pattern is None:
            if len(self._patterns) >= ACCOUNTS_MAX:
                return
            pattern = self._patterns[account] = _Pattern(by_hour=[0.0] * 24)
        usual = self._usual(account, hour)
        if usual:
            spent = min(spent, LEARNED_MAX * usual)
        of_day = hour % 24
        first, first_day = pattern.hours == 0, pattern.hours < 24
        pattern.mean += (spent - pattern.mean) * (1.0 if first else max(HOUR_WEIGHT, 1 / (pattern.hours + 1)))
        pattern.by_hour[of_day] += (spent - pattern.by_hour[of_day]) * (1.0 if first_day else DAY_WEIGHT)
        pattern.hours += 1
        self._changed = True

    def save(self) -> None:
        """Write the file if an hour was learned since the last time. Logs an `OSError`.

        Patterns of accounts that were not looked at since the start, as of deleted tenants, are not written.
        """
        if not self._changed or self._patterns is None:
            return
        self._changed = False
        rows = [(*account, pattern) for account, pattern in self._patterns.items() if account in self._now]
        fresh = self._file.with_name(f"{self._file.name}.new")
        try:
            fresh.write_bytes(msgspec.json.encode(rows))
            fresh.replace(self._file)
        except OSError as error:
            log.warning("%s: %s; a restart forgets the usual spend of budgets", self._file, error.strerror)

    def _read(self) -> dict[Account, _Pattern]:
        try:
            rows = msgspec.json.decode(self._file.read_bytes(), type=list[tuple[str, str, _Pattern]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, so the usual spend is learned again: %s", self._file, error)
            return {}
        return {(tenant, scope): each for tenant, scope, each in rows[:ACCOUNTS_MAX] if len(each.by_hour) == 24}
