"""`warmpath usage`: sums up usage and cost from the ledger, and checks, corrects and exports it.

The summary itself is the command without a subcommand. `verify` and `receipts` are here; the other subcommands have
modules of their own (`usage_export`, `usage_forecast`, `usage_maintenance`, `usage_reconcile`, `usage_vendors`,
`usage_collect`).
"""

from __future__ import annotations

import csv
import difflib
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Annotated, Any

import typer

from gateway.billing.ledger import verify as verify_ledger
from gateway.billing.ledger.chain import BrokenRow
from gateway.billing.ledger.compaction import read_lines
from gateway.billing.ledger.reader import (
    DIMENSIONS,
    TOKENS,
    UnreadableRow,
    UsageLine,
    latest_receipts,
    summarise,
    unbilled_work,
    unpriced_calls,
)
from gateway.cli.common import AsJson, fail, print_json, print_line, print_table, verb_app, warn
from gateway.cli.times import Since, Until, Zone
from gateway.cli.usage_anchor import anchor, check
from gateway.cli.usage_books import adjust, close, statement
from gateway.cli.usage_collect import collect
from gateway.cli.usage_common import LedgerOption, Models, Tenants, folder_of, period_of, readable, warn_of_set_aside
from gateway.cli.usage_export import export
from gateway.cli.usage_forecast import forecast
from gateway.cli.usage_invoice import check_invoice, invoice, new_key
from gateway.cli.usage_maintenance import compact, reprice
from gateway.cli.usage_reconcile import reconcile
from gateway.cli.usage_vendors import reconcile_vendor
from gateway.core.money import plain_text

app = verb_app(help="Sum up the ledger.", invoke_without_command=True, no_args_is_help=False)


def _dimensions(names: list[str] | None) -> list[str]:
    for name in names or []:
        if name not in DIMENSIONS:
            close = difflib.get_close_matches(name, DIMENSIONS, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(DIMENSIONS)}{meant}")
    return list(dict.fromkeys(names or []))


@app.callback()
def usage(
    context: typer.Context,
    by: Annotated[
        list[str] | None,
        typer.Option(
            callback=_dimensions,
            autocompletion=lambda: [*DIMENSIONS],
            metavar="WHAT",
            help=f"Group by {', '.join(DIMENSIONS)}. Repeatable.",
        ),
    ] = None,
    zone: Zone = "UTC",
    since: Since = None,
    until: Until = None,
    tenant: Tenants = None,
    model: Models = None,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Sum up requests, tokens and money. A call counts for the day on which it ended, in UTC or in `--zone`.

    INPUT is the input that was computed. CACHED is the input read from prefix caches, SHARE its share of all input, and
    SAVED the money that this saved. REASONING is part of OUTPUT. Answers from the response cache count as HITS, without
    tokens. INEXACT calls are billed by an estimate. UNPRICED calls are not in COST.
    """
    if context.invoked_subcommand is not None:
        if any((by, since, until, tenant, model, ledger, as_json, as_csv)):
            raise typer.BadParameter(f"options must follow {context.invoked_subcommand}")
        return
    if as_json and as_csv:
        raise typer.BadParameter("use --json or --csv, not both")
    by = by or []
    folder, period = folder_of(ledger), period_of(since, until, tenant, model)
    with readable() as set_aside:
        lines = summarise(folder, by=by, period=period, zone=zone, set_aside=set_aside)
    if as_json:
        print_json([_as_json(line) for line in lines])
    elif as_csv:
        _print_csv(by, lines)
    else:
        _print_table(by, lines)
        if any(line.unpriced for line in lines):
            with readable(quiet=True) as set_aside:
                _warn_of_unpriced(unpriced_calls(folder, period, set_aside=set_aside))


@app.command()
def verify(ledger: LedgerOption = None, as_json: AsJson = False) -> None:
    """Check that no row was changed, removed, added or moved. Prints the first row of each chain that was.

    Also names the rows that were not changed, but that `warmpath usage` sets aside, because a field does not fit.
    Prints the head of each chain, the hash that covers all rows before it. Keep the heads in another place: they later
    prove that no rows at the end are missing.
    """
    checked = verify_ledger(folder_of(ledger), read_lines)
    if as_json:
        all_broken, unreadable = _places(checked.all_broken), _places(checked.unreadable)
        found = {"broken": all_broken[0] if all_broken else None, "all_broken": all_broken, "unreadable": unreadable}
        print_json({"rows": checked.rows, "heads": checked.heads, **found})
        raise typer.Exit(1 if all_broken else 0)
    warn_of_set_aside(checked.unreadable)
    if checked.all_broken:
        fail("\n".join(map(str, checked.all_broken)))
    print_line(f"{checked.rows} rows verified")
    for replica, head in checked.heads.items():
        print_line(f"{replica}  {head}")


@app.command()
def receipts(
    last: Annotated[int, typer.Option(min=1, metavar="N", help="Number of receipts.")] = 10,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Show the last receipts, latest first."""
    with readable() as set_aside:
        rows = latest_receipts(folder_of(ledger), last, set_aside=set_aside)
    if as_json:
        print_json(rows)
        return
    columns = ("finished", "tenant", "key_id", "model_asked", "deployment", "outcome", "source")
    counts = ("input_uncached", "cache_read", "output")
    print_table(
        [name.upper() for name in (*columns, *counts)] + ["COST"],
        [[*(_cell(row[name]) for name in (*columns, *counts)), _price_cell(row)] for row in rows],
    )


@app.command()
def unbilled(
    since: Since = None,
    until: Until = None,
    tenant: Tenants = None,
    model: Models = None,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Sum up the attempts that no tenant pays for. They are cancelled hedges, and failed attempts before an answer.

    Their vendors may bill them. COST is by the list prices. INEXACT attempts are estimates by the vendor's rule for
    clients that leave. An outcome of `-` is unknown, because a gateway died.
    """
    with readable() as set_aside:
        lines = unbilled_work(folder_of(ledger), period_of(since, until, tenant, model), set_aside=set_aside)
    if as_json:
        costs = [{currency: plain_text(amount) for currency, amount in line.cost.items()} for line in lines]
        print_json([{**line._asdict(), "cost": cost} for line, cost in zip(lines, costs, strict=True)])
        return
    columns = ("DEPLOYMENT", "OUTCOME", "ATTEMPTS", "INPUT", "OUTPUT", "COST", "INEXACT", "UNPRICED")
    rows = [
        [line.deployment, _cell(line.outcome), *map(str, line[2:5]), _money(line.cost), *map(str, line[5:7])]
        for line in lines
    ]
    print_table(columns, rows)


app.command()(close)
app.command()(adjust)
app.command()(statement)
app.command()(invoice)
app.command("verify-invoice")(check_invoice)
app.command("make-key")(new_key)
app.command()(anchor)
app.command("check-anchors")(check)
app.command()(export)
app.command()(forecast)
app.command()(reprice)
app.command()(compact)
app.command()(reconcile)
app.command("reconcile-vendor")(reconcile_vendor)
app.command()(collect)


def _places(rows: Iterable[BrokenRow | UnreadableRow]) -> list[dict[str, Any]]:
    return [{"file": str(row.file), "line": row.line, "why": row.why} for row in rows]


def _warn_of_unpriced(found: list[tuple[str, str | None, int]]) -> None:
    for model, deployment, calls in found:
        target = f" on {deployment}" if deployment else ""
        warn(f"unpriced: {model}{target}, {calls} calls (add a price to the policy and run `warmpath usage reprice`)")


def _as_json(line: UsageLine) -> dict[str, Any]:
    values = line._asdict()
    group, cost, saved = values.pop("group"), values.pop("cost"), values.pop("saved")
    return {
        **group,
        **values,
        "cached_share": round(line.cached_share, 4),
        "cost": {currency: plain_text(amount) for currency, amount in cost.items()},
        "saved": {currency: plain_text(amount) for currency, amount in saved.items()},
    }


def _print_csv(by: Sequence[str], lines: list[UsageLine]) -> None:
    currencies = sorted({currency for line in lines for currency in line.cost})
    counts = ("requests", "cache_hits", *TOKENS)
    checks = ("inexact", "unpriced")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    money = [f"{what}_{currency}" for currency in currencies for what in ("cost", "saved")]
    writer.writerow([*by, *counts, *checks, *money])
    for line in lines:
        values = line._asdict()
        amounts = [_amount(of.get(currency)) for currency in currencies for of in (line.cost, line.saved)]
        writer.writerow([*line.group.values(), *(values[name] for name in (*counts, *checks)), *amounts])


def _print_table(by: Sequence[str], lines: list[UsageLine]) -> None:
    columns = ("REQUESTS", "HITS", "INPUT", "CACHED", "SHARE", "OUTPUT", "REASONING", "COST", "SAVED")
    rows = [
        [
            *(_cell(value) for value in line.group.values()),
            str(line.requests),
            str(line.cache_hits),
            str(line.input_uncached + line.cache_write),
            str(line.cache_read),
            f"{line.cached_share:.0%}",
            str(line.output),
            str(line.reasoning),
            _money(line.cost),
            _money(line.saved),
            str(line.inexact),
            str(line.unpriced),
        ]
        for line in lines
    ]
    print_table([*map(str.upper, by), *columns, "INEXACT", "UNPRICED"], rows)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _price_cell(row: dict[str, Any]) -> str:
    return "unpriced" if row["cost"] is None else f"{row['cost']} {row['currency'] or ''}".rstrip()


def _money(amounts: dict[str, Decimal]) -> str:
    return ", ".join(f"{plain_text(amount)} {currency}" for currency, amount in amounts.items()) or "-"


def _amount(amount: Decimal | None) -> str:
    return "" if amount is None else plain_text(amount)
