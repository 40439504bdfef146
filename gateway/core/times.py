"""Converts times (nanoseconds since the epoch, RFC 3339 text) and durations in Go's notation."""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime

_THREE_DIGITS = [f"{number:03d}" for number in range(1000)]
_GO_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")


def rfc3339(time_ns: int) -> str:
    """Convert to RFC 3339 text in UTC with microseconds, as in ledger rows. All have one length and sort by time."""
    microseconds = time_ns // 1000
    whole = _whole_seconds(microseconds // 1_000_000)
    return f"{whole}{_THREE_DIGITS[microseconds // 1000 % 1000]}{_THREE_DIGITS[microseconds % 1000]}Z"


def rfc3339_to_ns(rfc3339: str) -> int:
    """Convert RFC 3339 text to nanoseconds since the epoch, exact to the microsecond. The inverse of `rfc3339`."""
    return datetime_to_ns(datetime.fromisoformat(rfc3339))


def has_passed(rfc3339: str | None) -> bool:
    """Return whether the time is in the past. False for None, which means never."""
    return rfc3339 is not None and datetime.fromisoformat(rfc3339) <= datetime.now(UTC)


def datetime_to_ns(moment: datetime) -> int:
    """Convert to nanoseconds since the epoch, exact to the microsecond. `moment` must have a UTC offset.

    `datetime.timestamp` alone is a float, which is not exact.
    """
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000


@functools.lru_cache(maxsize=64)  # a receipt has half a dozen times, most of them within a few seconds
def _whole_seconds(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19] + "."


def go_duration(seconds: float) -> str:
    """Write seconds as Go's `time.Duration`, to the millisecond: `12ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    whole, milliseconds = divmod(milliseconds, 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    text = f"{second}.{milliseconds:03}".rstrip("0").rstrip(".") + "s" if milliseconds else f"{second}s"
    if hours:
        return f"{hours}h{minute}m{text}"
    return f"{minute}m{text}" if minute else text


def parse_go_duration(go_duration: str) -> float:
    """Parse a text of `go_duration` into seconds, to the millisecond. Accepts no other text."""
    match = _GO_DURATION.fullmatch(go_duration)
    assert match is not None, go_duration
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000
