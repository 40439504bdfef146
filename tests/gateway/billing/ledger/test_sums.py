"""Every sum of the ledger equals the sum that Python computes from the rows, whatever the rows are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.billing.ledger import UnbilledWork
from gateway.billing.ledger.focus import focus_rows
from gateway.billing.ledger.reader import Period, UsageLine, summarise, unbilled_work
from gateway.billing.ledger.rows import Correction
from gateway.billing.ledger.stripe import meter_events
from gateway.core.ids import new_event_id
from gateway.types import Receipt
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain

COUNTS = st.integers(0, 10**6)
COSTS = st.one_of(st.none(), st.decimals(0, 10**6, places=15))
DAYS = st.sampled_from(["2026-10-31", "2026-11-01", "2026-11-20"])


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    cost, day = draw(COSTS), draw(DAYS)
    return a_receipt(
        tenant=draw(st.sampled_from("ab")),
        model_asked=draw(st.sampled_from("mn")),
        source=draw(st.sampled_from(["engine", "estimate", "cache"])),
        outcome=draw(st.sampled_from(["complete", "refused", "client_gone"])),
        started=f"{day}T10:00:00.000001Z",
        finished=f"{day}T10:00:01.000001Z",
        input_uncached=draw(COUNTS),
        cache_read=draw(COUNTS),
        output=draw(COUNTS),
        reasoning=0,
        cost=None if cost is None else f"{cost:f}",
        currency=None if cost is None else draw(st.sampled_from(["USD", "EUR"])),
    )


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[list[Receipt], list[Correction], list[UnbilledWork]]:
    """Receipts, corrections of some, and unbilled attempts."""
    rows = draw(st.lists(receipts(), max_size=8))
    corrected = draw(st.lists(st.sampled_from(rows), max_size=3)) if rows else []
    amounts = st.decimals(-5, 5, places=6)
    corrections = [a_correction(row, cost=f"{draw(amounts):f}", currency=row.currency or "USD") for row in corrected]
    return rows, corrections, [an_attempt(draw) for _ in range(draw(st.integers(0, 3)))]


def an_attempt(draw: st.DrawFn) -> UnbilledWork:
    return UnbilledWork(
        event_id=new_event_id(), call_id="req_1", attempt=1, tenant="a", key_id="k", model_asked="m",
        deployment=draw(st.sampled_from("xy")), started="2026-11-01T10:00:00.000001Z",
        finished="2026-11-01T10:00:01.000001Z", exact=draw(st.booleans()), input_uncached=draw(COUNTS), cache_read=0,
        cache_write=0, output=draw(COUNTS), reasoning=0, trace_id="0" * 32,
        outcome=draw(st.sampled_from(["cut", None])),
        cost=f"{draw(st.decimals(0, 5, places=6)):f}", currency="USD",
    )  # fmt: skip


def expected(rows: Sequence[Receipt | Correction], corrections: Sequence[Correction], *by: str) -> dict[Any, Any]:
    """For each group: requests, hits, input, cached and output tokens, inexact and unpriced calls, and the costs."""
    found: dict[Any, Any] = defaultdict(lambda: ([0] * 7, defaultdict[str, Decimal](Decimal)))
    priced = {each.corrects for each in corrections}
    for row in rows:
        values = {"tenant": row.tenant, "model": row.model_asked, "day": row.finished[:10]}
        counts, costs = found[tuple(values[name] for name in by)]
        worked, is_receipt = row.source != "cache", type(row) is Receipt
        more = (
            is_receipt,
            is_receipt and not worked,
            row.input_uncached * worked,
            row.cache_read * worked,
            row.output * worked,
            is_receipt and row.source == "estimate" and row.outcome != "refused",
            is_receipt and row.cost is None and row.event_id not in priced,
        )
        counts[:] = [before + int(one) for before, one in zip(counts, more, strict=True)]
        if row.currency is not None:
            costs[row.currency] += Decimal(row.cost or 0)
    return {group: (counts, dict(costs)) for group, (counts, costs) in found.items()}


def summed(lines: list[UsageLine]) -> dict[Any, Any]:
    return {
        tuple(line.group.values()): (
            [line.requests, line.cache_hits, line.input_uncached, line.cache_read, line.output, line.inexact,
             line.unpriced],
            line.cost,
        )
        for line in lines
    }  # fmt: skip


@settings(max_examples=10)
@given(ledgers(), st.sampled_from([("tenant",), ("day",), ("tenant", "model", "day")]))
def test_sums(ledger: tuple[list[Receipt], list[Correction], list[UnbilledWork]], by: tuple[str, ...]) -> None:
    rows, corrections, attempts = ledger
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_chain(folder / "replica", [*rows, *attempts])
        write_chain(folder / "repricing", corrections)
        both = [*rows, *corrections]
        assert summed(summarise(folder, by=by)) == expected(both, corrections, *by)
        november = Period(since="2026-11-01T00:00:00.000000Z")
        of_november = [row for row in both if row.finished >= "2026-11"]
        assert summed(summarise(folder, by=by, period=november)) == expected(of_november, corrections, *by)

        owed = sum((Decimal(row.cost or 0) for row in both if row.currency is not None), Decimal(0))
        assert sum(Decimal(row["BilledCost"]) for row in focus_rows(folder, provider="p")) == owed
        tokens = sum(row.input_uncached + row.cache_read + row.output for row in rows if row.source != "cache")
        sent = meter_events(folder, event_name="t", customers={"a": "1", "b": "2"})
        assert sum(int(event["payload"]["value"]) for event in sent) == tokens

        lines = unbilled_work(folder)
        assert sum(line.attempts for line in lines) == len(attempts)
        assert sum(line.input for line in lines) == sum(each.input_uncached for each in attempts)
        assert sum(line.output for line in lines) == sum(each.output for each in attempts)
        assert sum(line.cost["USD"] for line in lines) == sum(Decimal(each.cost or 0) for each in attempts)
