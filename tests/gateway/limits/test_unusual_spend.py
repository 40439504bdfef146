"""Unusual spend: an hour is compared with what the same account usually spends in that hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.limits.unusual_spend import HOURS_MIN, LEARNED_MAX, HourOfSpend, SpendPatterns

START = 1_800_000_000 // 86_400 * 86_400  # midnight


class Account:
    """One account whose spend a test sets by hour."""

    def __init__(self, file: Path) -> None:
        self.patterns, self.now, self.spent = SpendPatterns(file), float(START), 0.0

    def look(self, period: str = "2027-01") -> HourOfSpend:
        return self.patterns.look(("t", "tenant t"), period, self.spent, self.now)

    def hour(self, amount: float) -> HourOfSpend:
        """Spend an amount in one hour, and go to the beginning of the next one."""
        self.look()
        self.spent += amount
        self.now += 1800
        found = self.look()
        self.now += 1800
        return found


@pytest.fixture
def account(tmp_path: Path) -> Account:
    account = Account(tmp_path / "patterns")
    account.hour(99.0)  # not seen from its beginning, as far as is known
    return account


def test_nothing_is_unusual_before_a_day_was_seen(account: Account) -> None:
    for _ in range(HOURS_MIN):
        found = account.hour(1.0)
        assert found.usual is None and not found.is_unusual(4.0, 0.0)
    assert account.hour(1.0).usual == pytest.approx(1.0)


def test_an_hour_is_compared_with_that_hour_of_the_day(account: Account) -> None:
    def day(hour: int) -> float:
        return 10.0 if hour == 9 else 1.0

    for hour in range(1, 24 * 4 + 9):
        account.hour(day(hour % 24))
    busy = account.hour(30.0)
    assert busy.usual == pytest.approx(10.0) and not busy.is_unusual(4.0, 1.0)
    quiet = account.hour(30.0)
    assert quiet.usual is not None and quiet.usual < 3.0
    assert quiet.is_unusual(4.0, 1.0) and not quiet.is_unusual(4.0, 31.0)


def test_one_unusual_hour_does_not_become_the_norm_and_a_lasting_change_does(account: Account) -> None:
    for _ in range(24 * 3):
        account.hour(1.0)
    assert account.hour(1000.0).is_unusual(4.0, 1.0)
    usual = account.hour(1.0).usual
    assert usual is not None and usual <= 1.0 + LEARNED_MAX / 24
    for _ in range(24 * 14):
        last = account.hour(10.0)
    assert not last.is_unusual(4.0, 1.0)


def test_the_spend_of_an_hour_crosses_the_boundary_of_a_period(account: Account) -> None:
    account.look()
    account.spent += 3.0
    account.look()
    account.spent = 2.0  # of the new period
    assert account.look("2027-02").spent == 5.0


def test_a_pause_is_not_learned_as_a_quiet_hour(account: Account) -> None:
    for _ in range(25):
        account.hour(1.0)
    account.now += 5 * 3600
    account.spent += 50.0  # between two looks
    hour = account.look()
    assert (hour.hour, hour.spent) == (int(account.now // 3600), 0.0) and hour.usual == pytest.approx(1.0)


def test_patterns_survive_a_restart(account: Account, tmp_path: Path) -> None:
    for _ in range(25):
        account.hour(1.0)
    account.patterns.save()
    account.patterns = SpendPatterns(tmp_path / "patterns")
    assert account.look().usual == pytest.approx(1.0)
    other = Account(tmp_path / "patterns")
    for _ in range(3):
        other.patterns.look(("new", "tenant new"), "2027-01", 1.0, other.now)
        other.now += 3600
    other.patterns.save()
    account.patterns = SpendPatterns(tmp_path / "patterns")
    assert account.look().usual is None, "an account that was not looked at is forgotten"
    (tmp_path / "patterns").write_text("not JSON")
    account.patterns = SpendPatterns(tmp_path / "patterns")
    assert account.look().usual is None
