"""The sums of the ledger, to the last decimal."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger.chain import GENESIS, encode_row
from gateway.ledger.reader import COLUMNS, Period, UnreadableLedger, latest, summarise
from gateway.types import Receipt
from tests.gateway.ledger.receipts import a_receipt


def write(ledger: Path, receipts: Sequence[Receipt], *, replica: str = "replica", rows_per_segment: int = 2) -> None:
    head, folder = GENESIS, ledger / replica
    folder.mkdir(parents=True)
    for start in range(0, len(receipts), rows_per_segment):
        with (folder / f"{start // rows_per_segment + 1:010d}.jsonl").open("wb") as segment:
            for receipt in receipts[start : start + rows_per_segment]:
                line, head = encode_row(receipt, head)
                segment.write(line)


def test_the_columns_are_the_receipts() -> None:
    assert list(COLUMNS) == [field.name for field in msgspec.structs.fields(Receipt)]


def test_an_empty_ledger_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "replica").mkdir()
    (tmp_path / "replica" / "0000000001.jsonl").touch()
    assert summarise(tmp_path) == [] and latest(tmp_path, 5) == []


def test_replicas_and_segments_are_one_ledger(tmp_path: Path) -> None:
    write(tmp_path, [a_receipt() for _ in range(5)], replica="a")
    write(tmp_path, [a_receipt() for _ in range(2)], replica="b")
    (line,) = summarise(tmp_path)
    assert (line.group, line.requests, line.output) == ({}, 7, 21)
    assert line.cost == {"USD": 7 * Decimal("0.00000544")}
    assert line.saved == {"USD": 7 * 64 * (Decimal("0.10") - Decimal("0.01")) / 1_000_000}
    assert line.cached_share == 0.64


def test_every_kind_of_call_counts_where_it_belongs(tmp_path: Path) -> None:
    free, unknown = "0", None
    no_price = {"price_input": None, "price_cached_input": None, "price_output": None, "currency": None}
    write(
        tmp_path,
        [
            a_receipt(),
            a_receipt(source="cache", cost=free, deployment=None, **no_price),
            a_receipt(source="estimate", exact=False, outcome="client_gone", reasoning=0),
            a_receipt(cost=unknown, **no_price),
            a_receipt(cost="1.5", currency="EUR", price_cached_input=None),
            a_receipt(
                source="estimate", exact=False, outcome="refused", cost=free, deployment=None,
                input_uncached=0, cache_read=0, output=0, reasoning=0, **no_price,
            ),
        ],
    )  # fmt: skip
    (line,) = summarise(tmp_path)
    assert (line.requests, line.cache_hits, line.inexact, line.unpriced) == (6, 1, 1, 1)
    assert (line.input_uncached, line.cache_read, line.output, line.reasoning) == (4 * 36, 4 * 64, 4 * 3, 3 * 2)
    assert line.cost == {"USD": 2 * Decimal("0.00000544"), "EUR": Decimal("1.5")}
    assert line.saved == {"USD": 2 * 64 * Decimal("0.00000009"), "EUR": 0}


def test_groups_are_in_order_and_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            a_receipt(tenant="b", finished="2026-11-20T23:59:59.999999Z"),
            a_receipt(tenant="b", finished="2026-11-21T00:00:00.000000Z"),
            a_receipt(tenant="a", deployment=None, latency_class="batch", key_id="k", model_asked="m"),
        ],
    )
    by = summarise(tmp_path, by=["tenant", "day"])
    assert [(line.group, line.requests) for line in by] == [
        ({"tenant": "a", "day": "2026-11-20"}, 1),
        ({"tenant": "b", "day": "2026-11-20"}, 1),
        ({"tenant": "b", "day": "2026-11-21"}, 1),
    ]
    (line, _) = summarise(tmp_path, by=["class", "deployment", "key", "model"])
    assert line.group == {"class": "batch", "deployment": None, "key": "k", "model": "m"}


def test_a_period_begins_with_since_and_ends_before_until(tmp_path: Path) -> None:
    days = [f"2026-11-{day}T00:00:00.000000Z" for day in (19, 20, 21)]
    write(tmp_path, [a_receipt(finished=day, tenant=tenant) for day in days for tenant in ("a", "b")])
    (line,) = summarise(tmp_path, period=Period(days[0], days[2], {"tenant": ["a"]}))
    assert line.requests == 2
    assert summarise(tmp_path, period=Period(only={"tenant": ["nobody"]})) == []


def test_the_latest_receipts_are_as_written(tmp_path: Path) -> None:
    receipts = [a_receipt(finished=f"2026-11-20T00:00:0{second}.000000Z", cost=None) for second in range(5)]
    write(tmp_path, receipts)
    found = latest(tmp_path, 2)
    assert [row["event_id"] for row in found] == [receipts[4].event_id, receipts[3].event_id]
    assert found[0]["price_input"] == "0.10" and found[0]["cost"] is None
    assert found[0]["attempts"] == [msgspec.to_builtins(attempt) for attempt in receipts[4].attempts]


def test_a_broken_ledger_is_not_summed_up(tmp_path: Path) -> None:
    write(tmp_path, [a_receipt()])
    with (tmp_path / "replica" / "0000000001.jsonl").open("ab") as segment:
        segment.write(b'{"v":1,"prev":"0\n')
    with pytest.raises(UnreadableLedger, match=r"0000000001\.jsonl"):
        summarise(tmp_path)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.decimals(0, 10**9, places=15), min_size=1, max_size=10))
def test_money_is_conserved(costs: list[Decimal]) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), [a_receipt(cost=f"{cost:f}") for cost in costs])
        (line,) = summarise(Path(folder))
        assert line.cost == {"USD": sum(costs)}
