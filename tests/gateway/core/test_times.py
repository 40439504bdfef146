from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.times import datetime_to_ns, go_duration, has_passed, parse_go_duration, rfc3339, rfc3339_to_ns


@given(st.lists(st.integers(0, 4_102_444_800_000_000_000), min_size=2, max_size=5))
def test_times_sort_as_text(times_ns: list[int]) -> None:
    texts = [rfc3339(time_ns // 1000 * 1000) for time_ns in sorted(times_ns)]
    assert texts == sorted(texts) and len({len(text) for text in texts}) == 1


@given(st.integers(0, 4_102_444_800_000_000_000))
def test_rfc3339_text_is_parsed_to_the_microsecond(time_ns: int) -> None:
    assert rfc3339_to_ns(rfc3339(time_ns)) == time_ns // 1000 * 1000


@given(st.datetimes(min_value=datetime(1970, 1, 2), timezones=st.timezones()))
def test_the_utc_offset_does_not_change_a_time(moment: datetime) -> None:
    assert datetime_to_ns(moment) == datetime_to_ns(moment.astimezone(UTC))


def test_no_time_never_passes() -> None:
    assert has_passed("2026-01-01T00:00:00Z") and not has_passed("9999-01-01T00:00:00Z")
    assert not has_passed(None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0001, "0s"), (0.012, "12ms"), (0.9996, "1s"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"),
        (83.25, "1m23.25s"), (360, "6m0s"), (3600, "1h0m0s"), (86_400, "24h0m0s"),
    ],
)  # fmt: skip
def test_durations_are_printed_as_in_go(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


@given(st.integers(0, 100 * 86_400_000))
def test_a_printed_duration_is_parsed_to_the_millisecond(milliseconds: int) -> None:
    assert round(parse_go_duration(go_duration(milliseconds / 1000)) * 1000) == milliseconds
