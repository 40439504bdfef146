"""Open calls are closed: across segments, restarts and unbilled attempts, and on a full disk."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.billing.ledger import Correction, Ledger, OpenCall, UnbilledWork, appender, verify, writer
from gateway.billing.ledger.retention import remove_old_segments
from gateway.billing.ledger.rows import attempts_left_open
from gateway.core.errors import LedgerUnavailable
from gateway.core.ids import new_event_id
from tests.gateway.billing.ledger.receipts import a_receipt

DAY_SECONDS = 86_400.0


def an_open_call(call_id: str, **changes: Any) -> OpenCall:
    known = {
        "event_id": new_event_id(), "call_id": call_id, "tenant": "acme", "key_id": "key_1", "end_user": None,
        "operation": "chat/completions", "model_asked": "gpt-4o", "deployment": "h200-a", "latency_class": "realtime",
        "service_tier": None, "started": "2026-11-20T10:00:00.000001Z", "prompt_tokens_estimate": 100,
        "policy_hash": "0123456789abcdef", "trace_id": "0" * 32,
    }  # fmt: skip
    return OpenCall(**{**known, **changes})


def unbilled(call_id: str, attempt: int, deployment: str = "h200-a") -> UnbilledWork:
    return UnbilledWork(
        event_id=new_event_id(), call_id=call_id, attempt=attempt, tenant="acme", key_id="key_1", model_asked="gpt-4o",
        deployment=deployment, started="", finished="", exact=True, input_uncached=1, cache_read=0, cache_write=0,
        output=1, reasoning=0, trace_id="0" * 32,
    )  # fmt: skip


def rows(chain: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(chain.glob("*.jsonl")) for line in file.read_bytes().splitlines()]


def open_call_ids(ledger: Ledger) -> set[str]:
    return {call[0].call_id for call in ledger.open_calls()}


async def test_open_calls_are_known_after_a_restart(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica") as ledger:
        for name in ("a", "b", "c"):
            ledger.open_call(an_open_call(name))
        ledger.append(a_receipt(call_id="b"))
        assert open_call_ids(ledger) == {"a", "c"} and ledger.open_call_count == 2
    async with Ledger(tmp_path, "replica") as ledger:
        assert open_call_ids(ledger) == {"a", "c"}
        ledger.append(a_receipt(call_id="a"))
    async with Ledger(tmp_path, "replica") as ledger:
        assert open_call_ids(ledger) == {"c"}
    assert verify(tmp_path).broken is None


async def test_a_segment_begins_with_the_open_attempts(tmp_path: Path) -> None:
    """So no other segment has to be read. Here, all before the last one are removed."""
    async with Ledger(tmp_path, "replica", segment_bytes=2500) as ledger:
        ledger.open_call(an_open_call("long"))
        for number in range(20):
            ledger.open_call(an_open_call(f"short {number}"))
            ledger.append(a_receipt(call_id=f"short {number}"))
    chain = tmp_path / "replica"
    *before, last = sorted(chain.glob("*.jsonl"))
    assert len(before) > 5 and verify(tmp_path).broken is None
    assert {json.loads(file.read_bytes().splitlines()[0])["kind"] for file in [*before[1:], last]} == {"carried"}
    ids = [row["event_id"] for row in rows(chain)]
    assert len(set(ids)) == len(ids)
    for file in before:
        file.unlink()
    async with Ledger(tmp_path, "replica") as ledger:
        assert open_call_ids(ledger) == {"long"}
    assert verify(tmp_path).broken is None


async def test_attempts_are_closed_one_by_one(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica") as ledger:
        for attempt, deployment in enumerate(["x", "y", "x"], start=1):
            ledger.open_call(an_open_call("a", attempt=attempt, deployment=deployment))
        ledger.append(a_receipt(call_id="a", deployment="x"))  # closes the third attempt
        assert [(each.attempt, each.in_vain) for each in ledger.open_attempts("a")] == [(1, True), (2, True)]
        ledger.append(unbilled("a", 1))
    async with Ledger(tmp_path, "replica", segment_bytes=1) as ledger:
        assert [(each.attempt, each.in_vain) for each in ledger.open_attempts("a")] == [(2, True)]
        ledger.append(a_receipt(call_id="b"))
    async with Ledger(tmp_path, "replica") as ledger:  # carried into another segment
        assert [(each.attempt, each.in_vain) for each in ledger.open_attempts("a")] == [(2, True)]
        ledger.append(unbilled("a", 2))
        assert ledger.open_call_count == 0
    assert verify(tmp_path).broken is None


async def test_a_receipt_that_bills_no_deployment_leaves_its_only_attempt_to_be_recorded_as_unbilled(
    tmp_path: Path,
) -> None:
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.open_call(an_open_call("a"))
        ledger.append(a_receipt(call_id="a", deployment=None))
        assert [each.in_vain for each in ledger.open_attempts("a")] == [True]
    async with Ledger(tmp_path, "replica") as ledger:
        assert [each.in_vain for each in ledger.open_attempts("a")] == [True]
        ledger.append(unbilled("a", 1))
        assert ledger.open_call_count == 0


def test_a_receipt_closes_its_own_attempt_or_the_only_one() -> None:
    one, two = an_open_call("a", deployment="x"), an_open_call("a", deployment="y", attempt=2)
    assert attempts_left_open([one], by="receipt", attempt=0, deployment="x") == []
    assert [each.attempt for each in attempts_left_open([one], by="receipt", attempt=0, deployment=None)] == [1]
    assert [each.attempt for each in attempts_left_open([one, two], by="receipt", attempt=0, deployment="x")] == [2]
    assert [each.attempt for each in attempts_left_open([one, two], by="receipt", attempt=0, deployment=None)] == [1, 2]


def test_each_attempt_has_a_request_id_of_its_own() -> None:
    assert [an_open_call("a", attempt=number).request_id for number in (1, 2)] == ["a", "a-2"]


async def test_a_correction_is_a_row_with_the_differences(tmp_path: Path) -> None:
    receipt = a_receipt(call_id="a")
    fields = {name: getattr(receipt, name) for name in receipt.__struct_fields__}
    correction = Correction(
        **{**fields, "event_id": new_event_id(), "cost": "-0.5", "output": 0},
        corrects=receipt.event_id, reason="reprice", corrected="2026-11-20T11:00:00.000000Z",
    )  # fmt: skip
    async with Ledger(tmp_path, "corrections") as ledger:
        ledger.append(correction)
        await ledger.durable()
        assert ledger.receipts_written == 0
    (row,) = rows(tmp_path / "corrections")
    assert (row["kind"], row["corrects"], row["cost"]) == ("correction", receipt.event_id, "-0.5")
    assert verify(tmp_path).broken is None


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", folder], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    monkeypatch.setattr(appender, "PREALLOCATE_BYTES", 16 * 1024)
    monkeypatch.setattr(writer, "PROBE_SECONDS", 0.01)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk with another file."""
    hog = folder / "hog"
    with hog.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return hog


@pytest.mark.parametrize("segment_bytes", [appender.SEGMENT_BYTES, 2500])
async def test_on_a_full_disk_open_calls_are_closed_and_none_is_opened(small_disk: Path, segment_bytes: int) -> None:
    async with Ledger(small_disk, "replica", segment_bytes=segment_bytes) as ledger:
        for number in range(10):
            ledger.open_call(an_open_call(f"call {number}"))
        await ledger.durable()
        hog = fill(small_disk)
        rejected = 0
        while ledger.ok:  # uses up the preallocated space
            try:
                ledger.open_call(an_open_call(f"more {rejected}"))
                ledger.append(a_receipt(call_id=f"more {rejected}"))
            except LedgerUnavailable:
                rejected += 1
        assert rejected == 1
        with pytest.raises(LedgerUnavailable, match="No space"):
            ledger.open_call(an_open_call("rejected"))
        for number in range(10):
            ledger.append(a_receipt(call_id=f"call {number}", end_user="x" * 1000))
        await ledger.durable()
        assert ledger.open_call_count == 0 and verify(small_disk).broken is None
        hog.unlink()
        assert ledger._prober is not None
        async with asyncio.timeout(10):
            await ledger._prober.join()
        ledger.check()
        ledger.open_call(an_open_call("again"))
        ledger.append(a_receipt(call_id="again"))
    assert verify(small_disk).broken is None
    assert "rejected" not in {row.get("call_id") for row in rows(small_disk / "replica")}


async def test_preallocated_space_is_released(tmp_path: Path) -> None:
    segment = tmp_path / "replica" / "0000000001.jsonl"
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.open_call(an_open_call("a"))
        allocated = segment.stat()
        if allocated.st_blocks * 512 < appender.PREALLOCATE_BYTES:
            pytest.skip("this file system does not support preallocation")
        assert allocated.st_size < 1000
    assert segment.stat().st_blocks * 512 < appender.PREALLOCATE_BYTES


async def test_the_ledger_works_without_preallocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appender, "preallocate", lambda *_: False)
    async with Ledger(tmp_path, "replica", segment_bytes=1000) as ledger:
        for number in range(3):
            ledger.open_call(an_open_call(f"{number}"))
            ledger.append(a_receipt(call_id=f"{number}"))
    assert verify(tmp_path).broken is None


async def test_a_slow_disk_rejects_new_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_NOT_DURABLE", 2)
    async with Ledger(tmp_path, "replica") as ledger:
        for number in range(3):
            ledger.open_call(an_open_call(f"{number}"))
        assert not ledger.ok
        with pytest.raises(LedgerUnavailable, match="too slow"):
            ledger.open_call(an_open_call("more"))
        ledger.append(a_receipt(call_id="0"))  # open calls can still be closed
        await ledger.durable(flush_now=True)
        ledger.check()


# Age


async def test_a_segment_is_not_older_than_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
        await ledger.durable(flush_now=True)
        ledger.append(a_receipt())
        monkeypatch.setattr(appender, "SEGMENT_SECONDS", -1.0)
        await ledger.durable(flush_now=True)
        ledger.append(a_receipt())
    names = [file.name for file in sorted((tmp_path / "replica").glob("*.jsonl"))]
    assert names == ["0000000001.jsonl", "0000000002.jsonl"] and verify(tmp_path).broken is None


async def test_the_chain_is_valid_after_old_segments_are_removed(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica", segment_bytes=1000) as ledger:
        for _ in range(6):
            ledger.append(a_receipt())
    chain = tmp_path / "replica"
    files = sorted(chain.glob("*.jsonl"))
    (chain / "0000000001.jsonl.torn").touch()
    later = files[-1].stat().st_mtime + 1
    assert remove_old_segments(chain, later - 3600, lambda number: True) == []
    assert remove_old_segments(chain, later, lambda number: number < 3) == [1, 2]
    assert sorted(file.name for file in chain.glob("0*")) == [file.name for file in files[2:]]
    assert (verify(tmp_path).rows, verify(tmp_path).broken) == (4, None)
    assert remove_old_segments(chain, later, lambda number: True) == [3, 4, 5], "the last segment stays"
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
    assert (verify(tmp_path).rows, verify(tmp_path).broken) == (2, None)


async def test_the_writer_removes_old_segments(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica", segment_bytes=1000, keep_days=0.0) as ledger:
        for _ in range(4):
            ledger.append(a_receipt())
    files = sorted(file.name for file in (tmp_path / "replica").glob("*.jsonl"))
    assert files == ["0000000004.jsonl"] and verify(tmp_path).broken is None
