"""Moments: nanoseconds since the epoch, and as the text that rows of the ledger have."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

_THREE_DIGITS = [f"{number:03d}" for number in range(1000)]


def rfc3339(time_ns: int) -> str:
    """UTC with microseconds, always of the same length: the order of the texts is the order of the times."""
    microseconds = time_ns // 1000
    whole = _whole_seconds(microseconds // 1_000_000)
    return f"{whole}{_THREE_DIGITS[microseconds // 1000 % 1000]}{_THREE_DIGITS[microseconds % 1000]}Z"


def nanoseconds_of(rfc3339: str) -> int:
    """Since the epoch: what `rfc3339` was made of, to the microsecond."""
    return nanoseconds_at(datetime.fromisoformat(rfc3339))


def has_passed(rfc3339: str | None) -> bool:
    """Whether a moment is over; none is never."""
    return rfc3339 is not None and datetime.fromisoformat(rfc3339) <= datetime.now(UTC)


def nanoseconds_at(moment: datetime) -> int:
    """Since the epoch, exact to the microsecond, as `timestamp` alone is not. A moment has its offset from UTC."""
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000


@functools.lru_cache(maxsize=64)  # a receipt has half a dozen times, mostly of the same few seconds
def _whole_seconds(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19] + "."
