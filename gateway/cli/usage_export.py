"""`warmpath usage export`: writes the ledger as CSV, JSONL, Parquet, FOCUS, or events of Stripe or OpenMeter."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from gateway.billing.books import Books
from gateway.billing.ledger.chain import RowError
from gateway.billing.ledger.focus import COLUMNS as FOCUS_COLUMNS
from gateway.billing.ledger.focus import focus_rows
from gateway.billing.ledger.openmeter import usage_events
from gateway.billing.ledger.reader import Period, UnreadableRow, bill_rows, unpriced_calls, write_parquet
from gateway.billing.ledger.stripe import VALUES, NoStripeCustomer, meter_events
from gateway.billing.ledger.stripe_state import ACCEPTED_SECONDS, NotRepeatable, open_exports
from gateway.cli.common import MISUSE, fail, print_stderr, warn
from gateway.cli.times import Since, Until
from gateway.cli.usage_common import LedgerOption, Models, Tenants, folder_of, period_of, readable
from gateway.core.money import plain_text
from gateway.core.times import rfc3339


def _customers(pairs: list[str] | None) -> list[str]:
    for pair in pairs or []:
        tenant, equals, customer = pair.partition("=")
        if not (tenant and equals and customer):
            raise typer.BadParameter(f"{pair!r} does not have the form TENANT=CUSTOMER, as in acme=cus_123")
    return pairs or []


def export(
    form: Annotated[
        Literal["csv", "jsonl", "parquet", "focus", "stripe", "openmeter"],
        typer.Argument(metavar="FORM", help="csv, jsonl, parquet, focus, stripe or openmeter."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file. Default: stdout.")] = None,
    since: Since = None,
    until: Until = None,
    tenant: Tenants = None,
    model: Models = None,
    ledger: LedgerOption = None,
    provider: Annotated[str, typer.Option(metavar="NAME", help="focus: name of the service provider.")] = "Warmpath",
    event_name: Annotated[
        str, typer.Option(metavar="NAME", help="stripe, openmeter: the event name, or type.")
    ] = "tokens",
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="stripe, openmeter: remembers what was exported. Default: FORM-exports.sqlite, beside the ledger.",
        ),
    ] = None,
    again: Annotated[
        int | None,
        typer.Option(metavar="N", help="stripe, openmeter: repeat export N, of which sending failed. Within 23 hours."),
    ] = None,
    value: Annotated[str, typer.Option(metavar="COUNT", help=f"stripe: counted value: {', '.join(VALUES)}.")] = "total",
    customer: Annotated[
        list[str] | None,
        typer.Option(
            callback=_customers, metavar="TENANT=ID", help="stripe: customer id of a tenant. openmeter: its subject."
        ),
    ] = None,
) -> None:
    """Export receipts and corrections for other tools.

    csv, jsonl and parquet have one row per receipt or correction and one column per field. focus is a CSV in the FinOps
    Open Cost and Usage Specification, summed by day, key, model and kind of token. stripe has one meter event per line,
    with the receipt's event id as its identifier; each is exported once, and those above 35 days of age never.
    openmeter has one CloudEvent per line, each exported once.
    """
    folder, period = folder_of(ledger), period_of(since, until, tenant, model)
    if value not in VALUES:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(VALUES)}", param_hint="--value")
    subjects = dict(pair.split("=", 1) for pair in customer or [])
    known = state or folder.parent / f"{form}-exports.sqlite"
    with readable() as set_aside:
        if form == "parquet":
            if out is None:
                fail("parquet needs --out FILE", code=MISUSE)
            count = write_parquet(folder, out, period, set_aside=set_aside)
        elif form == "openmeter":
            events = usage_events(
                folder, event_type=event_name, source=provider, subjects=subjects, period=period, set_aside=set_aside
            )
            with _opened(out) as file:
                count = _write_events(file, events, known, again, names=("id", "time"))
        elif form == "stripe":
            events = meter_events(
                folder, event_name=event_name, customers=subjects, value=value, period=period, set_aside=set_aside
            )
            with _opened(out) as file:
                count = _write_events(file, events, known, again, accepted_seconds=ACCEPTED_SECONDS)
        else:
            count = _write_table(form, out, folder, provider, period, set_aside)
    if out is not None:
        print_stderr(f"{count} rows written to {out}", style="dim")


def _write_table(
    form: Literal["csv", "jsonl", "focus"],
    out: Path | None,
    folder: Path,
    provider: str,
    period: Period,
    set_aside: list[UnreadableRow],
) -> int:
    """Write one row per receipt, or per sum for FOCUS. Return the number of rows."""
    with _opened(out) as file:
        if form == "csv":
            return _write_csv(file, None, _plain(bill_rows(folder, period, set_aside=set_aside)))
        if form == "jsonl":
            return _write_lines(file, _plain(bill_rows(folder, period, set_aside=set_aside)))
        count = _write_csv(file, FOCUS_COLUMNS, _focus(folder, provider, period, set_aside))
        _warn_of_unpriced(folder, period, set_aside)
        return count


def _focus(folder: Path, provider: str, period: Period, set_aside: list[UnreadableRow]) -> Iterator[dict[str, str]]:
    try:
        books = Books(folder, set_aside=set_aside)
    except RowError as error:
        fail(f"the closings were changed: {error}")
    closed = {name: closing.closed for name, closing in books.closed.items()}
    since, until, tenants = period.since or "", period.until or "9999", period.only.get("tenant")
    adjustments = [
        each
        for each in books.adjustments
        if since[:7] <= each.period < until[:10] and (not tenants or each.tenant in tenants)
    ]
    return focus_rows(
        folder, provider=provider, period=period, set_aside=set_aside, closed=closed, adjustments=adjustments
    )


def _write_events(
    file: TextIO,
    events: Iterator[dict[str, Any]],
    state: Path,
    again: int | None,
    *,
    names: tuple[str, str] = ("identifier", "timestamp"),
    accepted_seconds: float = math.inf,
) -> int:
    """Write the events that no export has, and record them in the same transaction. Or repeat an export.

    `names` are those of an event's fields for its identifier and its time. Events older than `accepted_seconds` are not
    written.
    """
    now, (name, time_name) = time.time(), names
    try:
        with open_exports(state) as exports:
            if again is not None:
                repeated = exports.repeat(again, now=now)
                return _write_lines(file, (event for event in events if event[name] in repeated))
            found = list(events)
            sent = exports.exported(event[name] for event in found)
            new = [event for event in found if event[name] not in sent]
            oldest = rfc3339(int((now - accepted_seconds) * 1e9)) if accepted_seconds < math.inf else ""
            accepted = [event for event in new if event[time_name] >= oldest]
            if not accepted:
                number = None
            else:
                _write_lines(file, iter(accepted))
                file.flush()
                number = exports.record((event[name] for event in accepted), now=now)
    except NoStripeCustomer as error:
        fail(str(error))
    except NotRepeatable as error:
        fail(str(error))
    except sqlite3.Error as error:
        fail(f"{state}: {error}")
    if len(new) > len(accepted):
        warn(f"{len(new) - len(accepted)} events not exported: Stripe accepts none older than 35 days")
    if sent:
        warn(f"{len(sent)} events not exported: an earlier export has them")
    if number is not None:
        print_stderr(f"export {number}; if sending it fails, repeat it with --again {number}", style="dim")
    return len(accepted)


def _plain(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows with money as decimal text, since readers would round floating-point numbers."""
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


def _warn_of_unpriced(folder: Path, period: Period, set_aside: list[UnreadableRow]) -> None:
    if missing := sum(calls for *_, calls in unpriced_calls(folder, period, set_aside=set_aside)):
        warn(f"{missing} calls without a price are not exported (`warmpath usage` lists their models)")


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
