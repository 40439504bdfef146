"""Sums over the ledger, to the last decimal."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.billing.ledger import tables
from gateway.billing.ledger.compaction import compact
from gateway.billing.ledger.focus import focus_rows
from gateway.billing.ledger.reader import (
    COLUMNS,
    Period,
    UnreadableLedger,
    UnreadableRow,
    bill_rows,
    corrected_receipts,
    latest_receipts,
    summarise,
    unpriced_calls,
    write_parquet,
)
from gateway.billing.ledger.rows import CarriedCalls, Row
from gateway.billing.ledger.stripe import meter_events
from gateway.types import AttemptRow, Receipt
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain


def write(ledger: Path, rows: Sequence[Row], *, replica: str = "replica") -> None:
    write_chain(ledger / replica, rows)


def test_the_columns_are_the_receipts() -> None:
    assert sorted(COLUMNS) == sorted(field.name for field in msgspec.structs.fields(Receipt))


def test_an_empty_ledger_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "replica").mkdir()
    (tmp_path / "replica" / "0000000001.jsonl").touch()
    assert summarise(tmp_path) == [] and latest_receipts(tmp_path, 5) == []


def test_replicas_and_segments_are_one_ledger(tmp_path: Path) -> None:
    write(tmp_path, [a_receipt() for _ in range(5)], replica="a")
    write(tmp_path, [a_receipt() for _ in range(2)], replica="b")
    (line,) = summarise(tmp_path)
    assert (line.group, line.requests, line.output) == ({}, 7, 21)
    assert line.cost == {"USD": 7 * Decimal("0.00000544")}
    assert line.saved == {"USD": 7 * 64 * (Decimal("0.10") - Decimal("0.01")) / 1_000_000}
    assert line.cached_share == 0.64


@pytest.mark.parametrize(
    ("by", "zone", "groups"),
    [
        ("month", "UTC", {"2026-10": 1, "2026-11": 2}),
        ("month", "Europe/Berlin", {"2026-11": 3}),
        ("week", "UTC", {"2026-W44": 1, "2026-W45": 1, "2026-W47": 1}),
        ("week", "America/New_York", {"2026-W44": 2, "2026-W47": 1}),
        ("day", "Asia/Kathmandu", {"2026-11-01": 1, "2026-11-02": 1, "2026-11-20": 1}),
        ("hour", "Asia/Kathmandu", {"2026-11-01T05:00": 1, "2026-11-02T06:00": 1, "2026-11-20T15:00": 1}),
    ],
)
def test_months_weeks_days_and_hours_are_those_of_a_time_zone(
    tmp_path: Path, by: str, zone: str, groups: dict[str, int]
) -> None:
    for number, finished in enumerate(("2026-10-31T23:30:00", "2026-11-02T00:30:00", "2026-11-20T10:00:00")):
        write(tmp_path, [a_receipt(finished=f"{finished}.000001Z")], replica=str(number))
    assert {line.group[by]: line.requests for line in summarise(tmp_path, by=[by], zone=zone)} == groups


def test_every_kind_of_call_is_counted(tmp_path: Path) -> None:
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


def test_groups_are_sorted_and_named(tmp_path: Path) -> None:
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


def test_the_latest_receipts_are_complete(tmp_path: Path) -> None:
    receipts = [a_receipt(finished=f"2026-11-20T00:00:0{second}.000000Z", cost=None) for second in range(5)]
    write(tmp_path, receipts)
    found = latest_receipts(tmp_path, 2)
    assert [row["event_id"] for row in found] == [receipts[4].event_id, receipts[3].event_id]
    assert found[0]["price_input"] == "0.10" and found[0]["cost"] is None
    assert found[0]["exact"] and found[0]["end_user"] is None
    assert (found[0]["operation"], found[0]["outcome"]) == ("chat/completions", "complete")
    assert found[0]["attempts"] == [
        {
            "deployment": "h200-a", "outcome": "ok", "status": 200, "started": "2026-11-20T10:00:00.000124Z",
            "ended": "2026-11-20T10:00:01.000000Z", "span_id": "0" * 16, "predicted_cached_tokens": 64,
        }
    ]  # fmt: skip


def test_a_receipt_with_damaged_times_does_not_hide_the_latest_receipts(tmp_path: Path) -> None:
    days = [f"2026-11-2{day}T00:00:00.000000Z" for day in range(3)]
    damaged = [a_receipt(started="then", finished=days[1])]
    damaged += [a_receipt(attempts=(AttemptRow("1" * 16, 1e300, 0.0),), finished=days[2])]
    write(tmp_path, [a_receipt(finished=days[0]), *damaged])
    attempts = [row["attempts"][0] for row in latest_receipts(tmp_path, 3)]
    assert [attempt.get("after") for attempt in attempts] == [1e300, 0.000123, None]
    assert attempts[2]["started"] == "2026-11-20T10:00:00.000124Z"


def test_a_chain_that_exists_twice_is_an_error(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [a_receipt() for _ in range(8)])
    shutil.copytree(tmp_path / "replica", tmp_path / "replica.0123456789abcdef")  # as if collected into the same folder
    (tmp_path / "replica" / "0000000001.jsonl").unlink()  # removed by retention
    compact(tmp_path, before=math.inf)
    with pytest.raises(
        UnreadableLedger, match=r"replica\.0123456789abcdef/0000000002\.parquet has the same rows as .*/replica/"
    ):
        summarise(tmp_path)
    shutil.rmtree(tmp_path / "replica")
    assert [line.requests for line in summarise(tmp_path)] == [8]


def test_an_unreadable_compacted_segment_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [a_receipt()])
    (tmp_path / "replica" / "0000000002.parquet").write_bytes(b"PAR1")
    (tmp_path / "replica" / "0000000002.manifest").write_bytes(b"{}")
    with pytest.raises(UnreadableLedger, match=r"0000000002\.parquet"):
        summarise(tmp_path)


UNREADABLE = {
    "torn": b'{"v":1,"prev":"0\n',
    "no JSON": b"\0\0\0\n",
    "no text": b'{"kind":"receipt","event_id":"\xff"}\n',
    "no object": b"[1]\n",
    "nested": b"[" * 100_000 + b"\n",
}
ABSURD: dict[str, dict[str, Any]] = {
    "a server's (size_t)-1": {"output": 2**64 - 1},
    "an input above 63 bits": {"input_uncached": 2**63},
    "a cost above 38 digits": {"cost": "1e400"},
    "a cost that is no number": {"cost": "many"},
    "costs whose sum has more than 38 digits": {"cost": "9" * 22},
    "a price above 18 digits": {"price_input": "1" + "0" * 12},
}


@pytest.mark.slow
@pytest.mark.parametrize("row", [*UNREADABLE.values(), *ABSURD.values()], ids=[*UNREADABLE, *ABSURD])
def test_an_unreadable_row_is_set_aside_and_named(
    tmp_path: Path, row: bytes | dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = [a_receipt(tenant="a"), a_receipt(tenant="b")]
    write(tmp_path, [good[0], a_correction(good[0], output=1)])
    other = tmp_path / "other"
    if isinstance(row, bytes):
        write_chain(other, [good[1]])
        with (other / "0000000001.jsonl").open("ab") as segment:
            segment.write(row)
        line = 2
    else:
        write_chain(other, [a_receipt(tenant="c", **row), good[1]])
        line = 1
        if row.get("cost") == "9" * 22:
            write_chain(tmp_path / "zz", [a_receipt(**row) for _ in range(20)], rows_per_segment=20)
    set_aside: list[UnreadableRow] = []
    lines = summarise(tmp_path, by=["tenant"], set_aside=set_aside)
    assert [(one.group["tenant"], one.requests, one.output) for one in lines] == [("a", 1, 4), ("b", 1, 3)]
    assert (set_aside[0].file, set_aside[0].line) == (other / "0000000001.jsonl", line)
    summarise(tmp_path)
    assert f"unreadable ledger row set aside: {other}/0000000001.jsonl:{line}: " in caplog.text
    ids, customers = (
        {receipt.event_id for receipt in good},
        {tenant: f"cus_{tenant}" for tenant in ("a", "b", "c", "acme")},
    )
    assert {each["event_id"] for each in latest_receipts(tmp_path, 50)} >= ids
    assert {each["event_id"] for each in bill_rows(tmp_path)} >= ids
    assert {each["event_id"] for each in corrected_receipts(tmp_path)} >= ids
    assert unpriced_calls(tmp_path) == []
    assert write_parquet(tmp_path, tmp_path / "out.parquet") >= 3
    assert len(list(focus_rows(tmp_path, provider="p"))) > 2
    assert {each["identifier"] for each in meter_events(tmp_path, event_name="e", customers=customers)} >= ids


def test_an_unreadable_correction_is_set_aside(tmp_path: Path) -> None:
    receipt = a_receipt()
    good, bad = a_correction(receipt, output=1), a_correction(receipt, output=2**64 - 1)
    write(tmp_path, [receipt, good, bad])
    set_aside: list[UnreadableRow] = []
    (line,) = summarise(tmp_path, set_aside=set_aside)
    assert line.output == receipt.output + 1 and [row.line for row in set_aside] == [1]


def test_a_row_without_a_day_stops_no_export(tmp_path: Path) -> None:
    write(tmp_path, [a_receipt(finished="2026-13-45T99:00:00Z"), a_receipt()])
    set_aside: list[UnreadableRow] = []
    rows = list(focus_rows(tmp_path, provider="p", set_aside=set_aside))
    assert {row["ChargePeriodStart"] for row in rows} == {"2026-11-20T00:00:00Z"} and len(set_aside) == 1


def test_a_readable_ledger_is_searched_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [a_receipt()])
    monkeypatch.setattr(tables, "find_unreadable", lambda file: pytest.fail("reads the ledger twice"))
    assert len(summarise(tmp_path)) == 1


@settings(max_examples=20)
@given(st.lists(st.decimals(0, 10**9, places=15), min_size=1, max_size=10))
def test_money_is_conserved(costs: list[Decimal]) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), [a_receipt(cost=f"{cost:f}") for cost in costs])
        (line,) = summarise(Path(folder))
        assert line.cost == {"USD": sum(costs)}


def test_corrections_are_added_to_the_day_and_the_cost_of_their_receipts(tmp_path: Path) -> None:
    priced, unknown = a_receipt(), a_receipt(cost=None, currency=None, price_input=None, price_cached_input=None)
    write(tmp_path, [priced, unknown, CarriedCalls(event_id="0" * 26, opened=())])
    new_price = {"price_input": "1", "price_cached_input": "0.5", "currency": "USD"}
    write(
        tmp_path,
        [
            a_correction(priced, cost="-0.00000044", output=-1),
            a_correction(unknown, cost="2", **new_price),
            a_correction(
                unknown, cost="0.5", corrected="2026-11-22T00:00:00.000000Z", **{**new_price, "price_input": "3"}
            ),
        ],
        replica="repricing",
    )
    (line,) = summarise(tmp_path, by=["day"])
    assert (line.group, line.requests, line.unpriced, line.output) == ({"day": "2026-11-20"}, 2, 0, 5)
    assert line.cost == {"USD": Decimal("0.000005") + Decimal("2.5")}
    assert line.saved == {"USD": 64 * (Decimal("0.09") + Decimal("2.5")) / 1_000_000}
    assert unpriced_calls(tmp_path) == []
    assert [(row["cost"], row["output"], row["currency"]) for row in corrected_receipts(tmp_path)] == [
        (Decimal("0.000005"), 2, "USD"),
        (Decimal("2.5"), 3, "USD"),
    ]
    assert [(row["kind"], row["corrects"]) for row in bill_rows(tmp_path)] == [
        ("receipt", None), ("receipt", None), ("correction", priced.event_id), *[("correction", unknown.event_id)] * 2,
    ]  # fmt: skip


def test_unpriced_calls_are_named(tmp_path: Path) -> None:
    unknown = {"cost": None, "currency": None}
    write(tmp_path, [a_receipt(**unknown), a_receipt(**unknown), a_receipt(**unknown, deployment="b"), a_receipt()])
    assert unpriced_calls(tmp_path) == [("gpt-4o", "b", 1), ("gpt-4o", "h200-a", 2)]


def test_sums_by_user_and_hour_and_of_audio(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            a_receipt(end_user="u", finished="2026-11-20T09:59:59.999999Z", audio_input=5),
            a_receipt(end_user="u", finished="2026-11-20T10:00:00.000000Z", audio_output=2),
        ],
    )
    found = [(line.group, line.audio_input, line.audio_output) for line in summarise(tmp_path, by=["user", "hour"])]
    assert found == [
        ({"user": "u", "hour": "2026-11-20T09:00"}, 5, 0),
        ({"user": "u", "hour": "2026-11-20T10:00"}, 0, 2),
    ]


def test_write_parquet(tmp_path: Path) -> None:
    receipt = a_receipt()
    write(tmp_path / "ledger", [receipt, a_correction(receipt, cost="1")])
    assert write_parquet(tmp_path / "ledger", tmp_path / "it's.parquet") == 2
    with duckdb.connect(":memory:") as connection:
        found = connection.execute(
            "SELECT sum(cost) FROM read_parquet($file)", {"file": str(tmp_path / "it's.parquet")}
        )
        assert found.fetchall() == [(Decimal("1.00000544"),)]
