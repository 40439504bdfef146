"""Lines of an invoice in whole cents, for import into an invoicing system.

A statement has amounts with up to fifteen decimals, and an invoice has the decimals of its currency. The total of each
currency is rounded half up. Each line is the statement's line rounded down or up to a cent, so that the lines add up to
that total: those with the largest fractions are rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal
from typing import NamedTuple

from gateway.billing.books import Statement, StatementLine, following

_NO_DECIMALS = ("CLP", "ISK", "JPY", "KRW", "PYG", "UGX", "VND", "XAF", "XOF", "XPF")  # ISO 4217
_THREE_DECIMALS = ("BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND")


class InvoiceLine(NamedTuple):
    """One line. `quantity` is the number of requests, or 1 for credits, adjustments and what was carried."""

    invoice: str  # the same for all lines of one invoice, which has one customer, month and currency
    customer: str
    period_start: str
    period_end: str  # the last day
    tenant: str
    kind: str
    description: str
    quantity: int
    amount: str
    currency: str


def invoice_lines(statements: Sequence[Statement], customer: str | None = None) -> list[InvoiceLine]:
    """Return the lines of one month's statements. All are for `customer`, by default each for its tenant."""
    groups: dict[tuple[str, str], list[tuple[Statement, StatementLine]]] = {}
    for statement in statements:
        for line in statement.lines:
            groups.setdefault((customer or statement.tenant, line.currency), []).append((statement, line))
    found: list[InvoiceLine] = []
    for (name, currency), lines in groups.items():
        amounts = rounded([Decimal(line.amount) for _, line in lines], decimals_of(currency))
        for (statement, line), amount in zip(lines, amounts, strict=True):
            start = f"{statement.period}-01"
            end = date.fromisoformat(f"{following(statement.period)}-01") - timedelta(days=1)
            found.append(
                InvoiceLine(
                    invoice_id(name, statement.period, currency), name, start, end.isoformat(), statement.tenant,
                    line.kind, line.description, line.requests or 1, f"{amount:f}", currency,
                )
            )  # fmt: skip
    return found


def invoice_id(customer: str, period: str, currency: str) -> str:
    """The id of the invoice of a customer for a month, as in 2026-11. There is one for each currency."""
    return f"{customer}-{period}-{currency}"


def decimals_of(currency: str) -> int:
    """The decimals of a currency (ISO 4217)."""
    return 0 if currency in _NO_DECIMALS else 3 if currency in _THREE_DECIMALS else 2


def rounded(amounts: Sequence[Decimal], decimals: int) -> list[Decimal]:
    """Round amounts to so many decimals, so that they add up to their rounded sum. Each is at most one unit off."""
    unit = Decimal(1).scaleb(-decimals)
    floors = [amount.quantize(unit, ROUND_FLOOR) for amount in amounts]
    total = sum(amounts, Decimal(0)).quantize(unit, ROUND_HALF_UP)
    missing = int((total - sum(floors, Decimal(0))) / unit)
    by_fraction = sorted(range(len(amounts)), key=lambda index: floors[index] - amounts[index])
    for index in by_fraction[:missing]:
        floors[index] += unit
    return floors
