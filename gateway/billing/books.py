"""Closed months, credits and adjustments, as rows of the ledger in a chain of their own (`CHAIN`).

A period is a calendar month (UTC). Closing a month records what each tenant owes for it, and that amount never changes.
What comes later, for example a correction of one of its calls or a receipt that another gateway ships late, is the
difference between the month's sums now and then. It is `carried` into the first open month. So every amount is billed
in exactly one month. Credits and adjustments have an author and a reason, and belong to an open month.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec

from gateway.billing.ledger import Ledger
from gateway.billing.ledger.chain import check_row, segments
from gateway.billing.ledger.compaction import read_lines
from gateway.billing.ledger.reader import Period, SetAside, summarise
from gateway.billing.ledger.rows import Adjustment, Closing, OwedLine
from gateway.billing.ledger.rows import decode as decode_row
from gateway.billing.ledger.tables import connect
from gateway.core.ids import new_event_id
from gateway.core.money import plain_text

CHAIN = "books"
_MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])")
Key = tuple[str, str, str]  # tenant, model, currency


class BooksError(Exception):
    """The period is closed, not over, or out of order. The message says which."""


class StatementLine(msgspec.Struct, frozen=True):
    """One line of a statement. `kind`: usage, carried (of a closed month), credit or adjustment."""

    kind: str
    description: str
    currency: str
    amount: str
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    author: str | None = None
    dated: str | None = None


class Statement(msgspec.Struct, frozen=True):
    """What one tenant owes for one month. `total` has the sum of the lines by currency. `closed` is None while open."""

    tenant: str
    period: str
    closed: str | None
    lines: tuple[StatementLine, ...]
    total: dict[str, str]


class OrganisationStatement(msgspec.Struct, frozen=True):
    """What a tenant and all tenants below it owe for one month. `total` is the sum of their totals by currency."""

    organisation: str
    period: str
    closed: str | None
    tenants: tuple[Statement, ...]
    total: dict[str, str]


class Books:
    """The closings and adjustments of a ledger, as they are when it is created."""

    def __init__(self, ledger: Path, *, set_aside: SetAside = None) -> None:
        """Read the chain. Raises `RowError` if one of its rows was changed."""
        self.ledger = ledger
        self._set_aside = set_aside
        self.closings: list[Closing] = []
        self.adjustments: list[Adjustment] = []
        folder = ledger / CHAIN
        for segment in segments(folder) if folder.is_dir() else ():
            for line in read_lines(segment):
                check_row(line)
                row = decode_row(line)
                if isinstance(row, Closing):
                    self.closings.append(row)
                elif isinstance(row, Adjustment):
                    self.adjustments.append(row)

    @property
    def closed(self) -> dict[str, Closing]:
        """The closed months."""
        return {closing.period: closing for closing in self.closings}

    def is_closed_at(self, period: str, moment: str) -> bool:
        """Whether a month was closed before a moment (RFC 3339)."""
        closing = self.closed.get(period)
        return closing is not None and closing.closed <= moment

    def owed(self, period: str) -> dict[Key, OwedLine]:
        """What the ledger says now about the calls that ended in a month, by tenant, model and currency."""
        since, until = bounds(period)
        lines = summarise(self.ledger, by=["tenant", "model"], period=Period(since, until), set_aside=self._set_aside)
        found = {}
        for line in lines:
            tenant, model = line.group["tenant"] or "", line.group["model"] or ""
            for index, (currency, amount) in enumerate(line.cost.items()):
                first = index == 0  # tokens are not by currency, so they are listed once
                found[tenant, model, currency] = OwedLine(
                    tenant, model, currency, plain_text(amount),
                    line.requests if first else 0,
                    (line.input_uncached + line.cache_read + line.cache_write) if first else 0,
                    line.output if first else 0,
                )  # fmt: skip
        return found

    def carried(self, period: str) -> list[tuple[str, OwedLine]]:
        """What is billed in a month for earlier, closed ones, with their names. A closed month's never changes."""
        closing = self.closed.get(period)
        if closing is not None:
            return [(line.period, line) for line in closing.carried]
        if self.closings and period != following(self.closings[-1].period):
            return []  # only the first open month takes them
        return [
            (closed.period, msgspec.structs.replace(line, period=closed.period))
            for closed in self.closings
            for line in self._since_closing(closed)
        ]

    def _since_closing(self, closing: Closing) -> list[OwedLine]:
        """The difference between a closed month's sums now and everything that was billed for it until now."""
        billed: dict[Key, Decimal] = {}
        for line in closing.owed:
            billed[_key(line)] = billed.get(_key(line), Decimal(0)) + Decimal(line.amount)
        for later in self.closings:
            for line in later.carried:
                if line.period == closing.period:
                    billed[_key(line)] = billed.get(_key(line), Decimal(0)) + Decimal(line.amount)
        now = {key: Decimal(line.amount) for key, line in self.owed(closing.period).items()}
        differences = {key: now.get(key, Decimal(0)) - billed.get(key, Decimal(0)) for key in {**billed, **now}}
        return [
            OwedLine(tenant, model, currency, plain_text(amount))
            for (tenant, model, currency), amount in sorted(differences.items())
            if amount
        ]

    def statements(self, period: str) -> list[Statement]:
        """What each tenant owes for a month, sorted by tenant."""
        closing = self.closed.get(period)
        owed: Iterable[OwedLine] = closing.owed if closing is not None else self.owed(period).values()
        lines: dict[str, list[StatementLine]] = {}
        for line in owed:
            lines.setdefault(line.tenant, []).append(
                StatementLine(
                    "usage",
                    line.model,
                    line.currency,
                    line.amount,
                    line.requests,
                    line.input_tokens,
                    line.output_tokens,
                )
            )
        for of, line in self.carried(period):
            lines.setdefault(line.tenant, []).append(
                StatementLine("carried", f"{line.model}, correction of {of}", line.currency, line.amount)
            )
        for each in self.adjustments:
            if each.period == period:
                lines.setdefault(each.tenant, []).append(
                    StatementLine(each.type, each.reason, each.currency, each.amount, author=each.author,
                                  dated=each.dated)
                )  # fmt: skip
        shown = closing.closed if closing is not None else None
        return [
            Statement(tenant, period, shown, tuple(found), total_of(found)) for tenant, found in sorted(lines.items())
        ]

    def statement_of(self, organisation: str, period: str) -> OrganisationStatement:
        """What an organisation owes for a month: the statements of it and of all tenants below it, and their sum.

        A tenant belongs to where it was at the end of its last call in or before the month.
        """
        members = self._members(organisation, period)
        found = tuple(each for each in self.statements(period) if each.tenant in members)
        closing = self.closed.get(period)
        closed = closing.closed if closing is not None else None
        total = total_of([line for each in found for line in each.lines])
        return OrganisationStatement(organisation, period, closed, found, total)

    def _members(self, organisation: str, period: str) -> set[str]:
        _, until = bounds(period)
        with connect(self.ledger, set_aside=self._set_aside) as connection:
            found = connection.execute(
                "SELECT tenant FROM receipts WHERE finished < $until GROUP BY tenant "
                "HAVING list_contains(coalesce(arg_max(parents, finished), []), $name)",
                {"until": until, "name": organisation},
            ).fetchall()
        return {organisation, *(name for (name,) in found)}

    async def close(self, period: str, *, author: str, now: str, heads: Mapping[str, str]) -> Closing:
        """Close a month, and return when that is durable. Raises `BooksError` and `LedgerUnavailable`."""
        _, until = bounds(period)
        if now < until:
            raise BooksError(f"{period} is not over yet")
        if period in self.closed:
            raise BooksError(f"{period} is closed already")
        if self.closings and period != (expected := following(self.closings[-1].period)):
            raise BooksError(f"months are closed in order: the next one is {expected}")
        closing = Closing(
            event_id=new_event_id(),
            period=period,
            closed=now,
            author=author,
            owed=tuple(self.owed(period).values()),
            carried=tuple(msgspec.structs.replace(line, period=of) for of, line in self.carried(period)),
            heads=dict(heads),
        )
        await _append(self.ledger, closing)
        self.closings.append(closing)
        return closing

    async def adjust(
        self, tenant: str, amount: Decimal, currency: str, *, kind: Literal["credit", "adjustment"], period: str,
        reason: str, author: str, now: str,
    ) -> Adjustment:  # fmt: skip
        """Add a credit or an adjustment to an open month. A credit's amount is negative.

        Raises `BooksError` and `LedgerUnavailable`.
        """
        bounds(period)
        if period in self.closed or (self.closings and period < self.closings[-1].period):
            raise BooksError(f"{period} is closed: use an open month")
        if not amount or (kind == "credit" and amount > 0):
            raise BooksError("the amount of a credit must be below zero, and that of an adjustment not zero")
        row = Adjustment(
            event_id=new_event_id(), tenant=tenant, period=period, type=kind, amount=plain_text(amount),
            currency=currency, reason=reason, author=author, dated=now,
        )  # fmt: skip
        await _append(self.ledger, row)
        self.adjustments.append(row)
        return row


def total_of(lines: Sequence[StatementLine]) -> dict[str, str]:
    """The sum of a statement's lines by currency."""
    sums: dict[str, Decimal] = {}
    for line in lines:
        sums[line.currency] = sums.get(line.currency, Decimal(0)) + Decimal(line.amount)
    return {currency: plain_text(amount) for currency, amount in sorted(sums.items())}


def bounds(period: str) -> tuple[str, str]:
    """The first moment of a month and of the next one, as in receipts. Raises `BooksError` if it is no month."""
    if not _MONTH.fullmatch(period):
        raise BooksError(f"{period!r} is no month, as in 2026-11")
    return f"{period}-01T00:00:00.000000Z", f"{following(period)}-01T00:00:00.000000Z"


def following(period: str) -> str:
    """The month after a month."""
    return (date.fromisoformat(f"{period}-01") + timedelta(days=31)).isoformat()[:7]


def _key(line: OwedLine) -> Key:
    return line.tenant, line.model, line.currency


async def _append(ledger: Path, row: Closing | Adjustment) -> None:
    async with Ledger(ledger, CHAIN) as chain:
        chain.append(row)
        await chain.durable(flush_now=True)
