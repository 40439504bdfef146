"""`warmpath usage export`: the ledger in the forms in which other tools read it."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from gateway.billing.ledger.focus import COLUMNS as FOCUS_COLUMNS
from gateway.billing.ledger.focus import focus_rows
from gateway.billing.ledger.reader import Period, bill_rows, unpriced_calls, write_parquet
from gateway.billing.ledger.stripe import VALUES, NoStripeCustomer, meter_events
from gateway.cli.common import MISUSE, complain, fail, warn
from gateway.cli.usage_common import LedgerOption, Models, Since, Tenants, Until, folder_of, period_of, readable
from gateway.core.money import plain_text


def _customers(pairs: list[str] | None) -> list[str]:
    for pair in pairs or []:
        tenant, equals, customer = pair.partition("=")
        if not (tenant and equals and customer):
            raise typer.BadParameter(f"{pair!r} is not TENANT=CUSTOMER, as in acme=cus_123")
    return pairs or []


def export(
    form: Annotated[
        Literal["csv", "jsonl", "parquet", "focus", "stripe"],
        typer.Argument(metavar="FORM", help="csv, jsonl, parquet, focus or stripe."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; left out: stdout.")] = None,
    since: Since = None,
    until: Until = None,
    tenant: Tenants = None,
    model: Models = None,
    ledger: LedgerOption = None,
    provider: Annotated[str, typer.Option(help="focus: who renders the service.")] = "Warmpath",
    event_name: Annotated[str, typer.Option(help="stripe: the meter's event name.")] = "tokens",
    value: Annotated[str, typer.Option(help=f"stripe: what is counted: {', '.join(VALUES)}.")] = "total",
    customer: Annotated[
        list[str] | None,
        typer.Option(callback=_customers, metavar="TENANT=ID", help="stripe: whose customer it is; may be repeated."),
    ] = None,
) -> None:
    """Write receipts and corrections for other tools.

    csv, jsonl and parquet have a row for each, with a column for each field. focus is a CSV by the FinOps Open Cost and
    Usage Specification, summed by day, key, model and kind of token. stripe is a line for each meter event, with the
    receipt's event id as its identifier.
    """
    folder, period = folder_of(ledger), period_of(since, until, tenant, model)
    if value not in VALUES:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(VALUES)}", param_hint="--value")
    with readable():
        if form == "parquet":
            if out is None:
                fail("parquet is written to a file: --out FILE", code=MISUSE)
            count = write_parquet(folder, out, period)
        else:
            with _opened(out) as file:
                if form == "csv":
                    count = _write_csv(file, None, _plain(bill_rows(folder, period)))
                elif form == "jsonl":
                    count = _write_lines(file, _plain(bill_rows(folder, period)))
                elif form == "focus":
                    count = _write_csv(file, FOCUS_COLUMNS, focus_rows(folder, provider=provider, period=period))
                    _warn_of_unpriced(folder, period)
                else:
                    customers = dict(pair.split("=", 1) for pair in customer or [])
                    count = _write_events(file, folder, event_name, customers, value, period)
    if out is not None:
        complain(f"{count} rows written to {out}", style="dim")


def _write_events(
    file: TextIO, folder: Path, event_name: str, customers: Mapping[str, str], value: str, period: Period
) -> int:
    events = meter_events(folder, event_name=event_name, customers=customers, value=value, period=period)
    try:
        return _write_lines(file, events)
    except NoStripeCustomer as error:
        fail(str(error))


def _plain(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Money as decimal text: a reader's floating point would round it."""
    for row in rows:
        yield {**row, "cost": None if row["cost"] is None else plain_text(row["cost"])}


def _write_csv(file: TextIO, columns: Iterable[str] | None, rows: Iterator[dict[str, Any]]) -> int:
    first = next(rows, None)
    if columns is None and first is None:
        return 0
    writer = csv.DictWriter(file, list(columns if columns is not None else first or ()), lineterminator="\n")
    writer.writeheader()
    count = 0
    for row in chain([first] if first is not None else [], rows):
        writer.writerow(row)
        count += 1
    return count


def _write_lines(file: TextIO, rows: Iterator[dict[str, Any]]) -> int:
    count = 0
    for row in rows:
        file.write(json.dumps(row, separators=(",", ":")) + "\n")
        count += 1
    return count


def _warn_of_unpriced(folder: Path, period: Period) -> None:
    if missing := sum(calls for *_, calls in unpriced_calls(folder, period)):
        warn(f"{missing} calls have no price, and so no row (`warmpath usage` names their models)")


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        fail(f"{out}: {error.strerror}")
