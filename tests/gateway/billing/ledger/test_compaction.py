"""Compacted segments have the same sums, the same proof and the same bytes."""

from __future__ import annotations

import errno
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest

from gateway.batches.receipts import events_in_ledger
from gateway.billing.ledger import Ledger
from gateway.billing.ledger.chain import UNCOMPACTED_SEGMENTS, segments, verify
from gateway.billing.ledger.compaction import compact, read_lines
from gateway.billing.ledger.compactor import Compactor
from gateway.billing.ledger.reader import UnreadableLedger, latest_receipts, summarise
from gateway.billing.ledger.retention import remove_old_segments
from gateway.billing.ledger.rows import CarriedCalls, Row
from gateway.billing.ledger.shipper import SegmentOffset, rows_after
from gateway.billing.ledger.tables import connect
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain

ROWS_PER_SEGMENT = 3


def rows() -> list[Row]:
    strange = 'a "quoted", \\ back\tslashed\n\x01 name, \u00fc\U0001f600'
    return [
        a_receipt(tenant="a", end_user=strange, finished="2026-11-19T10:00:00.000001Z"),
        a_receipt(tenant="b", cost=None, currency=None, price_input=None, price_cached_input=None, price_output=None),
        CarriedCalls(event_id="0" * 26, opened=()),
        *(a_receipt(tenant="a", output=number, audio_output=1, cost="0.000000000000001") for number in range(9)),
    ]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write_chain(tmp_path / "replica", rows(), rows_per_segment=ROWS_PER_SEGMENT)
    return tmp_path


def test_sums_proof_and_rows_stay_the_same(ledger: Path) -> None:
    lines = [(ledger / "replica" / f"{number:010d}.jsonl").read_bytes() for number in (1, 2)]
    sums = [summarise(ledger, by=by) for by in ([], ["tenant", "day"], ["user"])]
    proof, last = verify(ledger), latest_receipts(ledger, 20)
    done = compact(ledger, before=math.inf)
    assert [one.file.name for one in done] == ["0000000001.parquet", "0000000002.parquet"]
    assert sorted(file.suffix for file in (ledger / "replica").glob("0*")) == [
        *[".jsonl"] * UNCOMPACTED_SEGMENTS, *[".manifest"] * 2, *[".parquet"] * 2,
    ]  # fmt: skip
    assert [b"".join(read_lines(one.file)) for one in done] == lines
    assert [summarise(ledger, by=by) for by in ([], ["tenant", "day"], ["user"])] == sums
    assert verify(ledger, read_lines) == proof and proof.rows == 12 and proof.broken is None
    assert latest_receipts(ledger, 20) == last
    assert compact(ledger, before=math.inf) == []


def test_parquet_without_newer_columns_is_read(ledger: Path) -> None:
    """Parquet of an earlier version, beside Parquet of this version and lines."""
    sums, proof = summarise(ledger, by=["tenant"]), verify(ledger)
    first, _ = compact(ledger, before=math.inf)
    with duckdb.connect(":memory:") as connection:
        later = "cache_write_1h, price_cache_write_1h"
        connection.execute(f"CREATE TABLE rows AS SELECT * EXCLUDE ({later}) FROM read_parquet('{first.file}')")
        connection.execute(f"COPY rows TO '{first.file}' (FORMAT parquet)")
    assert summarise(ledger, by=["tenant"]) == sums
    assert verify(ledger, read_lines) == proof
    assert len(latest_receipts(ledger, 20)) == 11
    for other in (ledger / "replica").glob("*[2-9].*"):
        other.unlink()
    assert [line.requests for line in summarise(ledger, by=["tenant"])] == [1, 1]


def test_compacted_segments_do_not_verify_without_the_parquet_reader(ledger: Path) -> None:
    compact(ledger, before=math.inf)
    broken = verify(ledger).broken
    assert broken is not None and "compacted" in broken.why


def test_younger_segments_are_not_compacted(ledger: Path) -> None:
    assert compact(ledger, before=time.time() - 3600) == []


@pytest.mark.parametrize(
    ("change", "line", "why"),
    [
        ("line = replace(line, '\"tenant\":\"b\"', '\"tenant\":\"c\"'), tenant = replace(tenant, 'b', 'c')", 2, "hash"),
        ("tenant = 'c'", 1, "columns"),
        ("cost = 5", 1, "columns"),
    ],
)
def test_a_changed_row_is_named(ledger: Path, change: str, line: int, why: str) -> None:
    (first, _) = compact(ledger, before=math.inf)
    with duckdb.connect(":memory:") as connection:
        connection.execute(f"CREATE TABLE rows AS FROM read_parquet('{first.file}')")
        connection.execute(f"UPDATE rows SET {change} WHERE kind = 'receipt'")
        connection.execute(f"COPY rows TO '{first.file}' (FORMAT parquet)")
    broken = verify(ledger, read_lines).broken
    assert broken is not None and (broken.file, broken.line) == (first.file, line) and why in broken.why


def test_a_file_that_is_no_parquet_is_named(ledger: Path) -> None:
    (first, _) = compact(ledger, before=math.inf)
    first.file.write_bytes(b"PAR1")
    broken = verify(ledger, read_lines).broken
    assert broken is not None and (broken.file, broken.line) == (first.file, 1)
    with pytest.raises(UnreadableLedger):
        summarise(ledger)


def test_no_segment_is_removed_while_a_process_reads(ledger: Path) -> None:
    before = [file.name for file in segments(ledger / "replica")]
    with ThreadPoolExecutor(1) as executor:
        with connect(ledger) as reading:
            compacting = executor.submit(compact, ledger, before=math.inf)
            while not (ledger / "replica" / "0000000001.parquet").exists():
                time.sleep(0.005)
            assert remove_old_segments(ledger / "replica", math.inf, lambda _: True) == []
            assert reading.execute("SELECT count(*) FROM receipts").fetchall() == [(11,)]
            assert all((ledger / "replica" / name).exists() for name in before) and not compacting.done()
        assert len(compacting.result(20)) == 2
    assert not all((ledger / "replica" / name).exists() for name in before)


def test_a_read_only_ledger_is_verified(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", fail)
    assert verify(ledger).rows == 12


def test_a_broken_segment_is_not_compacted(ledger: Path) -> None:
    segment = ledger / "replica" / "0000000001.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b'"tenant":"b"', b'"tenant":"c"'))
    with pytest.raises(UnreadableLedger, match=r"0000000001\.jsonl:2: the row was changed"):
        compact(ledger, before=math.inf)
    assert segment.exists() and not segment.with_suffix(".parquet").exists()
    assert segment.with_name("0000000002.parquet").exists(), "the other segments are compacted"


def test_an_interrupted_compaction_is_repeated(ledger: Path) -> None:
    segment = ledger / "replica" / "0000000001.jsonl"
    content = segment.read_bytes()
    proof = verify(ledger)
    compact(ledger, before=math.inf)
    segment.write_bytes(content)  # killed before it removed the lines
    segment.with_suffix(".unfinished").write_bytes(b"half a file")
    assert verify(ledger, read_lines) == proof
    assert [one.file.name for one in compact(ledger, before=math.inf)] == ["0000000001.parquet"]
    assert verify(ledger, read_lines) == proof and not list((ledger / "replica").glob("*.unfinished"))


def test_old_compacted_segments_are_removed(ledger: Path) -> None:
    compact(ledger, before=math.inf)
    assert remove_old_segments(ledger / "replica", math.inf, lambda _: True) == [1, 2, 3]
    assert [file.name for file in (ledger / "replica").glob("0*")] == ["0000000004.jsonl"]


@pytest.mark.slow
async def test_a_gateway_compacts_its_closed_segments(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica", segment_bytes=4000) as ledger:
        compactor = Compactor(ledger)
        for _ in range(16):
            ledger.append(a_receipt())
        await ledger.durable(flush_now=True)
        ledger.may_remove_segment = lambda segment: segment < 2  # as if the others had not been shipped yet
        (sums,) = summarise(tmp_path, by=["tenant"])
        await compactor.catch_up()
        files = segments(ledger.folder)
        assert [file.suffix for file in files] == [".parquet", *[".jsonl"] * (len(files) - 1)] and len(files) >= 4
        ledger.may_remove_segment = lambda segment: True
        await compactor.catch_up()
        assert [file.suffix for file in segments(ledger.folder)] == [
            *[".parquet"] * (len(files) - UNCOMPACTED_SEGMENTS), *[".jsonl"] * UNCOMPACTED_SEGMENTS,
        ]  # fmt: skip
        assert compactor.segments_compacted == len(files) - UNCOMPACTED_SEGMENTS
        assert summarise(tmp_path, by=["tenant"]) == [sums]
    async with Ledger(tmp_path, "replica") as again:
        again.append(a_receipt())
    proof = verify(tmp_path, read_lines)
    assert proof.rows == 17 and proof.broken is None


async def test_a_broken_segment_is_logged_once_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Ledger(tmp_path, "replica", segment_bytes=4000) as ledger:
        for _ in range(14):
            ledger.append(a_receipt())
        await ledger.durable(flush_now=True)
        first, second, *_ = segments(ledger.folder)
        first.write_bytes(first.read_bytes().replace(b"acme", b"acne", 1))
        compactor = Compactor(ledger)
        await compactor.catch_up()
        await compactor.catch_up()
    assert first.exists() and not second.exists()
    (message,) = [record.getMessage() for record in caplog.records if record.name == "gateway.billing.ledger.compactor"]
    assert f"{first}:1" in message and "changed" in message


def test_compacted_rows_are_shipped_unchanged(ledger: Path) -> None:
    chain, end = ledger / "replica", SegmentOffset(4, 1 << 30)
    before = rows_after(chain, SegmentOffset(1, 0), end)
    compact(ledger, before=math.inf)
    assert rows_after(chain, SegmentOffset(1, 0), end) == before and len(before) == 12
    assert rows_after(chain, before[1][0], end) == before[2:]
    (chain / "0000000001.parquet").write_bytes(b"no parquet")
    with pytest.raises(OSError, match="0000000001"):
        rows_after(chain, SegmentOffset(1, 0), end)


async def test_a_batch_finds_its_receipts_in_compacted_segments(tmp_path: Path) -> None:
    receipts = [a_receipt() for _ in range(12)]
    write_chain(tmp_path / "replica", receipts, rows_per_segment=ROWS_PER_SEGMENT)
    compact(tmp_path, before=math.inf)
    event_ids = [receipts[0].event_id, receipts[11].event_id, "Z" * 26]
    assert await events_in_ledger(tmp_path, event_ids, since=0) == set(event_ids[:2])


def test_a_segment_with_an_unreadable_row_stays_uncompacted(tmp_path: Path) -> None:
    """Its columns would be null, so that the row would be counted with its cost and without its tokens."""
    write_chain(tmp_path / "replica", [a_receipt(), a_receipt(output=2**64 - 1), *(a_receipt() for _ in range(4))])
    with pytest.raises(UnreadableLedger, match=r"0000000001\.jsonl:2: the row is unreadable: output is 1844"):
        compact(tmp_path, before=math.inf)
    assert sorted(file.suffix for file in (tmp_path / "replica").glob("0*")) == [".jsonl"] * 3
