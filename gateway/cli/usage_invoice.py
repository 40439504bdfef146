"""`warmpath usage invoice`, `verify-invoice` and `make-key`: invoices that customers can verify themselves."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from gateway.billing.books import BooksError
from gateway.billing.ledger.chain import verify
from gateway.billing.ledger.compaction import read_lines
from gateway.cli.common import fail, print_line
from gateway.cli.usage_books import Month, books_of
from gateway.cli.usage_common import LedgerOption, readable


def new_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the private key, as in invoices.pem.")],
) -> None:
    """Make an Ed25519 key that signs invoices. Give the public key to your customers."""
    invoices = _invoices()
    try:
        public_key = invoices.make_key(file)
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    print_line(f"{file}: private key, keep it secret")
    print_line(f"{public_key}: public key")


def invoice(
    month: Month,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant.")],
    key: Annotated[
        Path, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Private key, from `usage make-key`.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the invoice.")],
    ledger: LedgerOption = None,
) -> None:
    """Write a signed invoice of a closed month. It has the statement, its receipts, and the heads of all chains.

    The customer checks it with `verify-invoice`, or with sha256sum and openssl.
    """
    invoices, books = _invoices(), books_of(ledger)
    with readable():
        try:
            statements = {each.tenant: each for each in books.statements(month)}
        except BooksError as error:
            fail(str(error))
    if tenant not in statements:
        fail(f"{tenant} has no charges in {month}")
    if statements[tenant].closed is None:
        fail(f"{month} is open: close it first, so that the invoice stays true (`warmpath usage close {month}`)")
    checked = verify(books.ledger, read_lines)
    if checked.all_broken:
        fail("the ledger was changed, so no invoice is signed:\n" + "\n".join(map(str, checked.all_broken)))
    try:
        invoices.write_invoice(books.ledger, statements[tenant], checked.heads, key, out)
    except invoices.InvoiceError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{out}: {error.strerror}")
    print_line(f"{out}: invoice of {tenant} for {month}")


def check_invoice(
    folder: Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The invoice.")],
    public_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="The key that you know. Default: DIR/public.pem."
        ),
    ] = None,
) -> None:
    """Verify an invoice. Checks its signature, its files, the hash of each receipt, and the sums of the statement."""
    invoices = _invoices()
    try:
        statement = invoices.verify_invoice(folder, public_key)
    except invoices.InvoiceError as error:
        fail(f"{folder}: {error}")
    print_line(f"valid: {statement.tenant}, {statement.period}")
    for currency, amount in statement.total.items():
        print_line(f"{amount} {currency}")


def _invoices() -> ModuleType:
    """The module that signs. Imported here, because the package `cryptography` is optional."""
    try:
        return importlib.import_module("gateway.billing.invoice")
    except ModuleNotFoundError:
        fail("the package cryptography is not installed: pip install 'warmpath[signing]'")
