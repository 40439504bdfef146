"""The times of options, such as --since, --until and --expires, which all verbs parse alike.

A time is a duration (`2h`, `7d`), `now`, `today`, `yesterday`, `tomorrow`, a day (`2026-11-01`), or a time
(`2026-11-01T06:00:00Z`). A duration is counted back from now, or forward for an expiry. A day means its start. The
default offset is UTC, as in the ledger, or that of the option `--zone`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from gateway.core.times import datetime_to_ns, rfc3339
from gateway.policy.fields import parse_duration
from gateway.policy.prices import parse_moment

# Files beside those of IANA's zones, on some systems. The reader of the ledger does not know their names.
_LOCAL_NAMES = ("localtime", "posixrules", "posix/", "right/")
_DAYS_AHEAD = {"today": 0, "yesterday": -1, "tomorrow": 1}


def parse_time(text: str, now: datetime | None = None, zone: tzinfo = UTC, *, forward: bool = False) -> datetime:
    """A time of the grammar above, in UTC. `forward`: a duration is counted forward. Raises ValueError.

    `zone` is that of days and of times without an offset.
    """
    now = now or datetime.now(UTC)
    word = text.strip().lower()
    if word == "now":
        return now
    if word in _DAYS_AHEAD:
        midnight = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
        return (midnight + timedelta(days=_DAYS_AHEAD[word])).astimezone(UTC)
    if _is_duration(word):
        distance = timedelta(seconds=float(parse_duration(word)))
        return now + distance if forward else now - distance
    try:
        moment: datetime = parse_moment(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time: use a duration {'from' if forward else 'before'} now as in 2h or 7d, today, "
            f"{'tomorrow' if forward else 'yesterday'}, a day as in 2026-11-01, or a time as in 2026-11-01T06:00:00Z"
        ) from None
    if zone is not UTC and (given := datetime.fromisoformat(text.strip())).tzinfo is None:
        return given.replace(tzinfo=zone).astimezone(UTC)
    return moment


def parse_expiry(text: str, now: datetime | None = None) -> float:
    """The seconds from now to a time of the grammar above. Raises ValueError if it is not in the future."""
    word = text.strip().lower()
    if _is_duration(word):  # of any length: the caller has a limit of its own
        seconds = float(parse_duration(word))
    else:
        now = now or datetime.now(UTC)
        seconds = (parse_time(text, now, forward=True) - now).total_seconds()
    if seconds <= 0:
        raise ValueError(f"{text} is not in the future")
    return seconds


def _is_duration(word: str) -> bool:
    return word[-1:].isalpha() and word[:1].isdigit() and "-" not in word


def ledger_time(context: typer.Context, text: str | None) -> str | None:
    """The time in the form of ledger rows, which sort by time. An option's callback: exits if it is invalid."""
    try:
        zone = context.params.get("zone") or "UTC"
        return None if text is None else rfc3339(datetime_to_ns(parse_time(text, zone=zone_of(zone))))
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is not in the years 1 to 9999") from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def zone_of(name: str) -> tzinfo:
    """The time zone of an IANA name. Raises `typer.BadParameter`."""
    if name == "UTC":
        return UTC
    try:
        if not name.startswith(_LOCAL_NAMES):
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise typer.BadParameter(f"{name!r} is no time zone, as in Europe/Berlin")


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
        callback=ledger_time,
        metavar="TIME",
        help="Only calls that ended at this time or later, as in 2h, yesterday or 2026-11-01.",
    ),
]
Until = Annotated[
    str | None,
    typer.Option(callback=ledger_time, metavar="TIME", help="Only calls that ended before this time."),
]
