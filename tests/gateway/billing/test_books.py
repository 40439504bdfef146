"""Closed months never change, and every amount is billed in exactly one month."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.billing.books import CHAIN, Books, BooksError
from gateway.billing.ledger.chain import RowError, verify
from gateway.billing.ledger.focus import focus_rows
from gateway.billing.ledger.reader import summarise
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain

JANUARY = "2027-01-02T00:00:00.000000Z"


def receipt(month: str, cost: str, **changes: Any) -> Any:
    moment = f"{month}-15T10:00:00.000000Z"
    return a_receipt(started=moment, finished=moment, cost=cost, **changes)


async def close(ledger: Path, month: str, now: str = JANUARY) -> None:
    await Books(ledger).close(month, author="ann", now=now, heads=verify(ledger).heads)


def totals(ledger: Path, month: str) -> dict[str, dict[str, str]]:
    return {each.tenant: each.total for each in Books(ledger).statements(month)}


async def test_a_correction_of_a_closed_month_is_billed_in_the_open_one(tmp_path: Path) -> None:
    november, december = receipt("2026-11", "5"), receipt("2026-12", "1")
    write_chain(tmp_path / "replica", [november, december])
    await close(tmp_path, "2026-11", "2026-12-01T00:00:00.000000Z")
    before = Books(tmp_path).statements("2026-11")
    corrections = [a_correction(november, cost="-2", corrected="2026-12-03T00:00:00.000000Z")]
    write_chain(tmp_path / "repricing", corrections)
    late = receipt("2026-11", "3", tenant="late")
    write_chain(tmp_path / "other", [late])
    assert Books(tmp_path).statements("2026-11") == before, "a closed month does not change"
    assert totals(tmp_path, "2026-12") == {"acme": {"USD": "-1"}, "late": {"USD": "3"}}
    carried = [line for each in Books(tmp_path).statements("2026-12") for line in each.lines if line.kind == "carried"]
    assert all("2026-11" in line.description for line in carried) and len(carried) == 2
    await close(tmp_path, "2026-12")
    assert totals(tmp_path, "2026-12") == {"acme": {"USD": "-1"}, "late": {"USD": "3"}}
    assert totals(tmp_path, "2027-01") == {}, "what was carried once is not carried again"


async def test_credits_and_adjustments_have_an_author_and_a_reason(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [receipt("2026-11", "5")])
    books = Books(tmp_path)
    kept: dict[str, Any] = {"period": "2026-11", "reason": "outage", "author": "ann", "now": JANUARY}
    await books.adjust("acme", Decimal("-1.5"), "USD", kind="credit", **kept)
    await books.adjust("acme", Decimal("0.25"), "EUR", kind="adjustment", **kept)
    (statement,) = Books(tmp_path).statements("2026-11")
    assert statement.total == {"EUR": "0.25", "USD": "3.5"}
    assert [(line.kind, line.description, line.author) for line in statement.lines[1:]] == [
        ("credit", "outage", "ann"), ("adjustment", "outage", "ann"),
    ]  # fmt: skip
    await close(tmp_path, "2026-11")
    with pytest.raises(BooksError, match="is closed"):
        await Books(tmp_path).adjust("acme", Decimal(-1), "USD", kind="credit", **kept)
    with pytest.raises(BooksError, match="below zero"):
        await Books(tmp_path).adjust("acme", Decimal(1), "USD", kind="credit", **{**kept, "period": "2026-12"})
    (line,) = summarise(tmp_path)
    assert line.cost == {"USD": Decimal(5)}, "usage is what was used"
    assert verify(tmp_path).broken is None


@pytest.mark.parametrize(
    ("month", "now", "why"),
    [
        ("2026-11", "2026-11-30T23:59:59.999999Z", "not over"),
        ("2026-13", JANUARY, "no month"),
        ("2026-10", JANUARY, "closed already"),
        ("2026-12", JANUARY, "the next one is 2026-11"),
    ],
)
async def test_months_are_closed_once_after_their_end_and_in_order(
    tmp_path: Path, month: str, now: str, why: str
) -> None:
    write_chain(tmp_path / "replica", [receipt("2026-10", "1")])
    await close(tmp_path, "2026-10")
    with pytest.raises(BooksError, match=why):
        await close(tmp_path, month, now)


async def test_changed_books_are_not_read(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [receipt("2026-11", "5")])
    await close(tmp_path, "2026-11")
    (segment,) = (tmp_path / CHAIN).glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b'"amount":"5"', b'"amount":"4"'))
    with pytest.raises(RowError):
        Books(tmp_path)


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("receipt"), st.sampled_from(["2026-09", "2026-10", "2026-11"]), st.integers(0, 99)),
            st.tuples(st.just("correction"), st.integers(0, 9), st.integers(-50, 50)),
            st.tuples(st.just("close"), st.just(""), st.just(0)),
        ),
        max_size=12,
    )
)
async def test_the_sum_of_all_statements_is_the_sum_of_all_rows(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, Any, int]]
) -> None:
    ledger = tmp_path_factory.mktemp("ledger")
    months, closed, receipts, expected = ["2026-09", "2026-10", "2026-11"], 0, list[Any](), Decimal(0)
    frozen: dict[str, Any] = {}
    for number, (kind, which, amount) in enumerate(events):
        if kind == "receipt":
            receipts.append(receipt(which, str(amount)))
            write_chain(ledger / f"r{number}", receipts[-1:])
            expected += amount
        elif kind == "correction" and receipts:
            of = receipts[which % len(receipts)]
            write_chain(ledger / f"r{number}", [a_correction(of, cost=str(amount), corrected=JANUARY)])
            expected += amount
        elif kind == "close" and closed < len(months):
            ledger.mkdir(exist_ok=True)
            await close(ledger, months[closed])
            frozen[months[closed]] = totals(ledger, months[closed])
            closed += 1
    billed = [totals(ledger, month) for month in (*months, "2026-12")]
    assert sum(Decimal(each.get("acme", {}).get("USD", "0")) for each in billed) == expected
    assert all(totals(ledger, month) == known for month, known in frozen.items())


async def test_focus_marks_corrections_of_closed_months_only(tmp_path: Path) -> None:
    november = receipt("2026-11", "0.00000544")
    write_chain(tmp_path / "replica", [november])
    write_chain(
        tmp_path / "repricing",
        [
            a_correction(november, cost="-0.000001", corrected="2026-11-20T00:00:00.000000Z"),
            a_correction(november, cost="-0.000002", corrected="2026-12-05T00:00:00.000000Z"),
        ],
    )
    await close(tmp_path, "2026-11", "2026-12-01T00:00:00.000000Z")
    books = Books(tmp_path)
    await books.adjust(
        "acme", Decimal(-1), "USD", kind="credit", period="2026-12", reason="outage", author="ann", now=JANUARY
    )
    closed = {name: closing.closed for name, closing in books.closed.items()}
    rows = list(focus_rows(tmp_path, provider="Us", closed=closed, adjustments=books.adjustments))
    found = {
        (row["BilledCost"], row["ChargeCategory"], row["ChargeClass"], row["BillingPeriodStart"][:7]) for row in rows
    }
    assert {
        ("-0.000001", "Adjustment", "", "2026-11"),
        ("-0.000002", "Usage", "Correction", "2026-12"),
        ("-1", "Credit", "", "2026-12"),
    } <= found
