"""What the verbs below `warmpath usage` share: which ledger, which calls, and what is said of a broken one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from gateway.billing.ledger.reader import DIMENSIONS, Period, UnreadableLedger
from gateway.cli.common import fail, settings_or_exit, well_formed
from gateway.core.times import datetime_to_ns, rfc3339
from gateway.policy.prices import parse_moment

LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", metavar="DIR", help="The ledger's folder; left out: WARMPATH_LEDGER_DIR.")
]


def _moment(text: str | None) -> str | None:
    """A day, or a time with or without its offset, in the form of the ledger; without one, UTC."""
    with well_formed():
        return None if text is None else rfc3339(datetime_to_ns(parse_moment(text)))


Since = Annotated[
    str | None, typer.Option(callback=_moment, metavar="TIME", help="Calls that ended at this time or later.")
]
Until = Annotated[str | None, typer.Option(callback=_moment, metavar="TIME", help="Calls that ended before this time.")]
Tenants = Annotated[list[str] | None, typer.Option("--tenant", help="Calls of this tenant alone; may be repeated.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="Calls for this model alone; may be repeated.")]


def period_of(
    since: str | None, until: str | None, tenants: list[str] | None = None, models: list[str] | None = None
) -> Period:
    only = {"tenant": tenants, "model": models}
    assert only.keys() <= DIMENSIONS.keys()
    return Period(since, until, {name: values for name, values in only.items() if values})


def folder_of(ledger: Path | None) -> Path:
    folder = settings_or_exit(ledger_dir=ledger).ledger_dir
    if not folder.is_dir():
        fail(f"there is no ledger at {folder}: the gateway makes it; --ledger or WARMPATH_LEDGER_DIR say where it is")
    return folder


@contextlib.contextmanager
def readable() -> Iterator[None]:
    try:
        yield
    except UnreadableLedger as error:
        fail(f"the ledger can not be read (`warmpath usage verify` names the row): {error}")
