"""Shared by the subcommands of `warmpath usage`: options for the ledger and the calls, and errors of reading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gateway.billing.ledger.reader import DIMENSIONS, Period, UnreadableLedger, UnreadableRow
from gateway.billing.ledger.unreadable import LISTED_MAX
from gateway.cli.common import fail, settings_or_exit, warn

LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", metavar="DIR", help="Folder of the ledger. Default: WARMPATH_LEDGER_DIR.")
]


Tenants = Annotated[
    list[str] | None, typer.Option("--tenant", metavar="TENANT", help="Only calls of this tenant. Repeatable.")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", metavar="MODEL", help="Only calls for this model. Repeatable.")
]


def period_of(
    since: str | None, until: str | None, tenants: list[str] | None = None, models: list[str] | None = None
) -> Period:
    """The selection of calls that the common options describe."""
    only = {"tenant": tenants, "model": models}
    assert only.keys() <= DIMENSIONS.keys()
    return Period(since, until, {name: values for name, values in only.items() if values})


def folder_of(ledger: Path | None) -> Path:
    """The ledger's folder. Exits if it does not exist."""
    folder = settings_or_exit(ledger_dir=ledger).ledger_dir
    if not folder.is_dir():
        fail(f"no ledger in {folder}; set --ledger or WARMPATH_LEDGER_DIR to the folder that the gateway writes")
    return folder


@contextlib.contextmanager
def readable(*, quiet: bool = False) -> Iterator[list[UnreadableRow]]:
    """Report an unreadable ledger in the block as an error, and exit.

    Pass the list to readers, as `set_aside`. The end of the block prints the rows in it, unless `quiet`.
    """
    set_aside: list[UnreadableRow] = []
    try:
        yield set_aside
    except UnreadableLedger as error:
        fail(f"cannot read the ledger (`warmpath usage verify` finds the row): {error}")
    if not quiet:
        warn_of_set_aside(set_aside)


def warn_of_set_aside(rows: Sequence[UnreadableRow]) -> None:
    """Say on stderr how many rows are unreadable, and name the first ones."""
    if not rows:
        return
    warn(f"{len(rows)} unreadable {'row is' if len(rows) == 1 else 'rows are'} set aside and not counted:")
    for row in rows[:LISTED_MAX]:
        warn(f"  {row}")
