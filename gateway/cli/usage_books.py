"""`warmpath usage close`, `adjust` and `statement`: close a month, give credits, and write statements."""

from __future__ import annotations

import asyncio
import csv
import getpass
import sys
import time
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import msgspec
import typer

from gateway.billing.books import Books, BooksError, OrganisationStatement, Statement, following
from gateway.billing.invoice_lines import InvoiceLine, invoice_lines
from gateway.billing.ledger.chain import RowError, verify
from gateway.billing.ledger.compaction import read_lines
from gateway.billing.ledger.rows import Adjustment
from gateway.cli.common import AsJson, fail, print_json, print_line, print_table, settings_or_exit, usage_error
from gateway.cli.stored import audited
from gateway.cli.usage_common import LedgerOption, Tenants, folder_of, readable
from gateway.core.errors import LedgerUnavailable
from gateway.core.money import plain_text
from gateway.core.times import rfc3339

Month = Annotated[str, typer.Argument(metavar="MONTH", help="A calendar month (UTC), as in 2026-11.")]
Author = Annotated[
    str, typer.Option(metavar="NAME", help="Who does this; recorded in the ledger.", default_factory=getpass.getuser)
]
MONEY_DECIMALS = 15


def books_of(ledger: LedgerOption) -> Books:
    """The closings and adjustments of a ledger. Exits if one of their rows was changed."""
    folder = folder_of(ledger)
    try:
        return Books(folder)
    except RowError as error:
        fail(f"the closings were changed: {error}")


def close(month: Month, author: Author, ledger: LedgerOption = None, as_json: AsJson = False) -> None:
    """Close a month. What each tenant owes for it never changes afterwards.

    Corrections and receipts that come later are carried into the first open month. Months are closed in order, after
    their end. The ledger is verified first, and the heads of its chains are recorded.
    """
    books = books_of(ledger)
    checked = verify(books.ledger, read_lines)
    if checked.all_broken:
        fail("the ledger was changed, so nothing is closed:\n" + "\n".join(map(str, checked.all_broken)))
    with readable():
        try:
            asyncio.run(_close(books, month, author, checked.heads))
        except BooksError as error:
            fail(str(error))
        except LedgerUnavailable as error:
            fail(error.message)
        statements = books.statements(month)
    if as_json:
        print_json(msgspec.to_builtins(statements))
        return
    print_line(f"{month} is closed; the open month is {following(month)}")
    _print_totals(statements)


async def _close(books: Books, month: str, author: str, heads: Mapping[str, str]) -> None:
    async with audited(settings_or_exit(), "usage close", target=month, details={"author": author}):
        await books.close(month, author=author, now=rfc3339(time.time_ns()), heads=heads)


def adjust(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="Decimal: what the tenant gets as a credit, or owes in addition.")
    ],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="For the statement, as in 'outage of 3 November'.")],
    author: Author,
    month: Annotated[
        str, typer.Option(metavar="MONTH", help="The open month to which it belongs. Default: the present one.")
    ] = "",
    currency: Annotated[str, typer.Option(metavar="CURRENCY", help="Three letters, ISO 4217.")] = "USD",
    kind: Annotated[
        Literal["credit", "adjustment"], typer.Option(help="A credit lowers the bill, an adjustment changes it.")
    ] = "credit",
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Add a credit or an adjustment to a tenant's statement. It is a row of the ledger and is never changed."""
    with usage_error():
        try:
            value = Decimal(amount)
        except InvalidOperation:
            raise ValueError(f"{amount!r} is no decimal amount, as in 12.50") from None
        exponent = value.as_tuple().exponent
        if not value.is_finite() or not isinstance(exponent, int) or -exponent > MONEY_DECIMALS:
            raise ValueError(f"{amount!r} has more than {MONEY_DECIMALS} decimals")
        if len(currency) != 3 or not currency.isalpha() or not currency.isupper():
            raise ValueError(f"{currency!r} is no currency, as in USD")
    if kind == "credit":
        value = -abs(value)
    now = rfc3339(time.time_ns())
    details = {"amount": plain_text(value), "currency": currency, "reason": reason, "author": author}

    async def add() -> Adjustment:
        async with audited(settings_or_exit(), f"usage adjust {kind}", target=tenant, details=details):
            return await books_of(ledger).adjust(
                tenant, value, currency, kind=kind, period=month or now[:7], reason=reason, author=author, now=now
            )

    try:
        row = asyncio.run(add())
    except BooksError as error:
        fail(str(error))
    except LedgerUnavailable as error:
        fail(error.message)
    if as_json:
        print_json(msgspec.to_builtins(row))
    else:
        print_line(f"{row.type} of {row.amount} {row.currency} for {tenant} in {row.period}")


def statement(
    month: Month,
    tenant: Tenants = None,
    organisation: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Only this tenant and all tenants below it, and their sum.")
    ] = None,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line per charge.")] = False,
    as_invoice: Annotated[
        bool,
        typer.Option(
            "--invoice",
            help="Print CSV for import into an invoicing system: whole cents that add up. One invoice per customer "
            "and currency; the customer is the organisation, or else the tenant.",
        ),
    ] = False,
) -> None:
    """Show what each tenant owes for a month. Shows usage by model, amounts carried over, credits and adjustments.

    The statement of a closed month never changes.
    """
    if as_json + as_csv + as_invoice > 1:
        raise typer.BadParameter("use only one of --json, --csv and --invoice")
    if tenant and organisation:
        raise typer.BadParameter("use --tenant or --organisation, not both")
    whole: OrganisationStatement | None = None
    with readable():
        try:
            books = books_of(ledger)
            if organisation is not None:
                whole = books.statement_of(organisation, month)
            statements = [*whole.tenants] if whole is not None else books.statements(month)
        except BooksError as error:
            fail(str(error))
    statements = [each for each in statements if not tenant or each.tenant in tenant]
    if as_json:
        print_json(msgspec.to_builtins(statements if whole is None else whole))
    elif as_invoice:
        lines = csv.writer(sys.stdout, lineterminator="\n")
        lines.writerows([InvoiceLine._fields, *invoice_lines(statements, organisation)])
    elif as_csv:
        _print_csv(statements)
    else:
        print_table(
            ["TENANT", "KIND", "DESCRIPTION", "REQUESTS", "AMOUNT"],
            [
                [each.tenant, line.kind, line.description, str(line.requests or "-"), f"{line.amount} {line.currency}"]
                for each in statements
                for line in each.lines
            ],
        )
        _print_totals(statements)
        for currency, amount in whole.total.items() if whole is not None else ():
            print_line(f"{organisation} and below  {amount} {currency}")


def _print_totals(statements: list[Statement]) -> None:
    for each in statements:
        for currency, amount in each.total.items():
            print_line(f"{each.tenant}  {amount} {currency}")


def _print_csv(statements: list[Statement]) -> None:
    columns = ["tenant", "period", "closed", "kind", "description", "requests", "input_tokens", "output_tokens",
               "amount", "currency", "author", "dated"]  # fmt: skip
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    for each in statements:
        for line in each.lines:
            row: dict[str, Any] = msgspec.structs.asdict(line)
            writer.writerow({"tenant": each.tenant, "period": each.period, "closed": each.closed, **row})
