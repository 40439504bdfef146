"""The options --since and --until, which all verbs parse alike.

A time is a duration before now (`2h`, `7d`), `now`, `today`, `yesterday`, a day (`2026-11-01`), or a time
(`2026-11-01T06:00:00Z`). A day means its start. The default offset is UTC, as in the ledger.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from gateway.core.times import datetime_to_ns, rfc3339
from gateway.policy.fields import parse_duration
from gateway.policy.prices import parse_moment

_DAYS_AGO = {"today": 0, "yesterday": 1}


def parse_time(text: str, now: datetime | None = None) -> datetime:
    """A time of the grammar above, in UTC. Raises ValueError."""
    now = now or datetime.now(UTC)
    word = text.strip().lower()
    if word == "now":
        return now
    if word in _DAYS_AGO:
        return now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=_DAYS_AGO[word])
    if word[-1:].isalpha() and word[:1].isdigit() and "-" not in word:
        return now - timedelta(seconds=float(parse_duration(word)))
    try:
        moment: datetime = parse_moment(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time: use a duration before now as in 2h or 7d, today, yesterday, a day as in "
            "2026-11-01, or a time as in 2026-11-01T06:00:00Z"
        ) from None
    return moment


def _ledger_time(text: str | None) -> str | None:
    """The time in the form of ledger rows, which sort by time."""
    try:
        return None if text is None else rfc3339(datetime_to_ns(parse_time(text)))
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error)) from None


Since = Annotated[
    str | None,
    typer.Option(
        callback=_ledger_time,
        metavar="TIME",
        help="Only calls that ended at this time or later, as in 2h, yesterday or 2026-11-01.",
    ),
]
Until = Annotated[
    str | None,
    typer.Option(callback=_ledger_time, metavar="TIME", help="Only calls that ended before this time."),
]
