"""The options --since and --until, which all verbs parse alike.

A time is a duration before now (`2h`, `7d`), `now`, `today`, `yesterday`, a day (`2026-11-01`), or a time
(`2026-11-01T06:00:00Z`). A day means its start. The default offset is UTC, as in the ledger, or that of the
option `--zone`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from gateway.core.times import datetime_to_ns, rfc3339
from gateway.policy.fields import parse_duration
from gateway.policy.prices import parse_moment

_DAYS_AGO = {"today": 0, "yesterday": 1}


def parse_time(text: str, now: datetime | None = None, zone: tzinfo = UTC) -> datetime:
    """A time of the grammar above, in UTC. `zone` is that of days and of times without an offset. Raises ValueError."""
    now = now or datetime.now(UTC)
    word = text.strip().lower()
    if word == "now":
        return now
    if word in _DAYS_AGO:
        midnight = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
        return (midnight - timedelta(days=_DAYS_AGO[word])).astimezone(UTC)
    if word[-1:].isalpha() and word[:1].isdigit() and "-" not in word:
        return now - timedelta(seconds=float(parse_duration(word)))
    try:
        moment: datetime = parse_moment(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time: use a duration before now as in 2h or 7d, today, yesterday, a day as in "
            "2026-11-01, or a time as in 2026-11-01T06:00:00Z"
        ) from None
    if zone is not UTC and (given := datetime.fromisoformat(text.strip())).tzinfo is None:
        return given.replace(tzinfo=zone).astimezone(UTC)
    return moment


def _ledger_time(context: typer.Context, text: str | None) -> str | None:
    """The time in the form of ledger rows, which sort by time."""
    try:
        zone = context.params.get("zone") or "UTC"
        return None if text is None else rfc3339(datetime_to_ns(parse_time(text, zone=zone_of(zone))))
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error)) from None


def zone_of(name: str) -> tzinfo:
    """The time zone of an IANA name. Raises `typer.BadParameter`."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise typer.BadParameter(f"{name!r} is no time zone, as in Europe/Berlin") from None


def _zone_name(name: str) -> str:
    zone_of(name)
    return name


Zone = Annotated[
    str,
    typer.Option(
        callback=_zone_name,
        is_eager=True,  # the times are parsed with it
        metavar="ZONE",
        help="Time zone of months, weeks, days and hours, as in Europe/Berlin, and of times without an offset.",
    ),
]
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
