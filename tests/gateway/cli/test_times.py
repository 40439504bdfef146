"""The grammar of --since and --until."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.cli.times import parse_expiry, parse_time

NOW = datetime(2026, 11, 23, 21, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", "2026-11-23T19:30"),
        ("90m", "2026-11-23T20:00"),
        ("7d", "2026-11-16T21:30"),
        ("now", "2026-11-23T21:30"),
        ("today", "2026-11-23T00:00"),
        (" Yesterday ", "2026-11-22T00:00"),
        ("tomorrow", "2026-11-24T00:00"),
        ("2026-11-01", "2026-11-01T00:00"),
        ("2026-11-01T06:00:00+02:00", "2026-11-01T04:00"),
        ("2026-11-01T06:00:00Z", "2026-11-01T06:00"),
    ],
)
def test_times(text: str, expected: str) -> None:
    assert parse_time(text, NOW).isoformat(timespec="minutes") == f"{expected}+00:00"


@pytest.mark.parametrize("text", ["", "sometime", "2x", "h", "2026-13-01", "-2h"])
def test_other_texts_are_errors_that_show_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match="as in"):
        parse_time(text, NOW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 30 * 86400), ("90m", 5400), ("tomorrow", 2.5 * 3600), ("2026-11-25", 26.5 * 3600)],
)
def test_an_expiry_counts_forward(text: str, seconds: float) -> None:
    assert parse_expiry(text, NOW) == seconds


@pytest.mark.parametrize("text", ["now", "today", "yesterday", "2026-11-23T21:30:00Z", "0d"])
def test_an_expiry_is_in_the_future(text: str) -> None:
    with pytest.raises(ValueError, match="is not in the future"):
        parse_expiry(text, NOW)
