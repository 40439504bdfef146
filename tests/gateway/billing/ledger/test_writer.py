"""Rows are whole, chained, and never lost once `append` has returned, whatever fails."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.billing.ledger import Ledger, verify, writer
from gateway.core import supervision
from gateway.core.errors import LedgerUnavailable
from tests.gateway.billing.ledger import append_until_killed
from tests.gateway.billing.ledger.receipts import a_receipt

REPOSITORY = Path(__file__).parents[4]


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(directory.glob("*/*.jsonl")) for line in file.read_bytes().splitlines()]


def event_ids(directory: Path) -> list[str]:
    return [row["event_id"] for row in rows(directory)]


async def test_rows_are_readable_at_once_and_durable_on_request(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica") as ledger:
        receipts = [a_receipt() for _ in range(3)]
        for receipt in receipts:
            ledger.append(receipt)
        assert event_ids(tmp_path) == [receipt.event_id for receipt in receipts]
        await ledger.durable()
        assert ledger.ok and ledger.receipts_written == 3
    assert verify(tmp_path).broken is None


async def test_one_fsync_covers_all_waiting_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    async with Ledger(tmp_path, "replica") as ledger:
        monkeypatch.setattr(writer, "sync", lambda full, segment, folder: synced.append(segment))
        waiting = []
        for _ in range(50):
            ledger.append(a_receipt())
            waiting.append(ledger.durable())
        await asyncio.gather(*waiting)
        assert len(synced) == 1
        await ledger.durable()
        assert len(synced) == 1  # no new rows


async def test_a_row_written_during_an_fsync_waits_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, running, syncs = asyncio.get_running_loop(), asyncio.Event(), 0

    def sync(full: list[int], segment: int, folder: Path) -> None:
        nonlocal syncs
        syncs += 1
        loop.call_soon_threadsafe(running.set)

    async with Ledger(tmp_path, "replica") as ledger:
        monkeypatch.setattr(writer, "sync", sync)
        ledger.append(a_receipt())
        await running.wait()
        ledger.append(a_receipt())
        async with asyncio.timeout(30):
            await ledger.durable()
        assert syncs == 2


async def test_a_chain_continues_over_restarts_and_segments(tmp_path: Path) -> None:
    for _ in range(3):
        async with Ledger(tmp_path, "replica", segment_bytes=2500) as ledger:
            for _ in range(4):
                ledger.append(a_receipt())
    names = sorted(file.name for file in (tmp_path / "replica").glob("*.jsonl"))
    assert names == [f"{number:010d}.jsonl" for number in range(1, len(names) + 1)] and len(names) > 2
    assert all((tmp_path / "replica" / name).stat().st_size <= 2500 for name in names)
    assert (verify(tmp_path).rows, verify(tmp_path).broken) == (12, None)


async def test_replicas_have_chains_of_their_own(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "a") as a, Ledger(tmp_path, "b") as b:
        a.append(a_receipt())
        b.append(a_receipt())
    assert verify(tmp_path).rows == 2 and set(verify(tmp_path).heads) == {"a", "b"}


async def test_a_second_writer_of_a_chain_is_rejected(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica"):
        with pytest.raises(LedgerUnavailable, match=rf"process {os.getpid()}; give every gateway its own replica name"):
            Ledger(tmp_path, "replica").open()
    async with Ledger(tmp_path, "replica"):
        pass


@pytest.mark.parametrize("replica", ["", "..", "a/b", "-x", "a b"])
def test_a_replica_name_must_be_a_folder_name(tmp_path: Path, replica: str) -> None:
    with pytest.raises(ValueError, match="must be a folder name"):
        Ledger(tmp_path, replica)


def test_an_unusable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerUnavailable, match="cannot be opened"):
        Ledger(tmp_path / "file", "replica").open()


@pytest.mark.parametrize("torn", [b'{"v":1,"prev":"', b"\0" * 5000, b"\0\n\0\n", b'{"v":1}\n'])
async def test_a_torn_end_is_moved_aside(tmp_path: Path, torn: bytes) -> None:
    segment = tmp_path / "replica" / "0000000001.jsonl"
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
    with segment.open("ab") as file:
        file.write(torn)
    assert verify(tmp_path).broken
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
    assert (verify(tmp_path).rows, verify(tmp_path).broken) == (2, None)
    assert segment.with_name(segment.name + ".torn").read_bytes() == torn


async def test_a_segment_with_nothing_but_a_torn_row_continues_the_one_before(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
    (tmp_path / "replica" / "0000000002.jsonl").write_bytes(b'{"v":')
    (tmp_path / "replica" / "0000000003.jsonl").touch()
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
    # Only the last segment is repaired, since a crash breaks no earlier one.
    broken = verify(tmp_path).broken
    assert broken and broken.file.name == "0000000002.jsonl"
    (tmp_path / "replica" / "0000000002.jsonl").write_bytes(b"")
    assert (verify(tmp_path).rows, verify(tmp_path).broken) == (2, None)


async def test_a_newer_versions_ledger_is_not_changed(tmp_path: Path) -> None:
    segment = tmp_path / "replica" / "0000000001.jsonl"
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
    newer = segment.read_bytes().replace(b'"v":1', b'"v":2')
    segment.write_bytes(newer)
    with pytest.raises(LedgerUnavailable, match="schema version 2"):
        Ledger(tmp_path, "replica").open()
    assert segment.read_bytes() == newer


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Simulates a disk that fills up in the middle of a row: writes beyond the limit are short, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_leaves_no_half_row_and_recovers_with_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "PROBE_SECONDS", 0)
    async with Ledger(tmp_path, "replica") as ledger:
        ledger.append(a_receipt())
        size = (tmp_path / "replica" / "0000000001.jsonl").stat().st_size
        with file_size_limit(size + 100):
            for _ in range(2):
                lost = a_receipt()
                with pytest.raises(LedgerUnavailable, match="no space for a whole row"):
                    ledger.append(lost)
                assert lost.event_id in caplog.text
            assert not ledger.ok
            with pytest.raises(LedgerUnavailable):
                ledger.check()
            assert (verify(tmp_path).rows, verify(tmp_path).broken) == (1, None)
            await ledger.durable()  # earlier rows are durable
        assert ledger._prober is not None
        await ledger._prober.join()
        ledger.check()
        ledger.append(a_receipt())
    assert (verify(tmp_path).rows, verify(tmp_path).broken) == (2, None)


async def test_a_segment_that_cannot_begin(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "replica", segment_bytes=1) as ledger:
        ledger.append(a_receipt())
        (tmp_path / "replica" / "0000000002.jsonl").mkdir()
        with pytest.raises(LedgerUnavailable, match="cannot begin the segment"):
            ledger.append(a_receipt())
        (tmp_path / "replica" / "0000000002.jsonl").rmdir()
        ledger.append(a_receipt())
    assert (verify(tmp_path).rows, verify(tmp_path).broken) == (2, None)


async def test_after_any_failure_of_the_fsync_no_row_counts_as_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(full: list[int], segment: int, folder: Path) -> None:
        raise ValueError("a bug")

    async with Ledger(tmp_path, "replica") as ledger:
        monkeypatch.setattr(writer, "sync", failing)
        ledger.append(a_receipt())
        with pytest.raises(LedgerUnavailable, match="ValueError; restart the gateway"):
            await ledger.durable(flush_now=True)
        assert not ledger.ok


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("a bug")])
async def test_rows_become_durable_although_old_segments_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(writer, "remove_old_segments", failing)
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.001)
    async with Ledger(tmp_path, "replica", segment_bytes=1000, keep_days=0.0) as ledger, asyncio.timeout(30):
        for _ in range(5):
            ledger.append(a_receipt())
            await ledger.durable(flush_now=True)
        assert ledger.ok


async def test_after_a_failed_fsync_no_row_counts_as_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(full: list[int], segment: int, folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with Ledger(tmp_path, "replica") as ledger:
        monkeypatch.setattr(writer, "sync", failing)
        ledger.append(a_receipt())
        with pytest.raises(LedgerUnavailable, match="restart"):
            await ledger.durable()
        assert not ledger.ok
        with pytest.raises(LedgerUnavailable, match="restart"):
            ledger.append(a_receipt())
    assert verify(tmp_path).rows == 1


Run = tuple[int, bytes | None]
runs = st.lists(
    st.tuples(st.integers(0, 8), st.none() | st.sampled_from([b"", b'{"v":1,"prev":"0', b"\0\0\0", b"\n"])), max_size=5
)


@settings(max_examples=20)
@given(runs)
def test_the_chain_holds_over_random_histories(runs: list[Run]) -> None:
    """Each run appends rows, then ends cleanly (None) or with a crash that leaves the bytes of a torn write."""

    async def run(directory: Path, count: int, torn: bytes | None) -> list[str]:
        ledger = Ledger(directory, "replica", segment_bytes=3000)
        ledger.open()
        receipts = [a_receipt() for _ in range(count)]
        for receipt in receipts:
            ledger.append(receipt)
        if torn is None:
            await ledger.close()
        else:
            if ledger._committer:
                await ledger._committer.cancel()
            ledger._chain.close()
            with max((directory / "replica").glob("*.jsonl")).open("ab") as file:
                file.write(torn)
        return [receipt.event_id for receipt in receipts]

    with TemporaryDirectory() as folder:
        directory = Path(folder)
        written = [event_id for count, torn in runs for event_id in asyncio.run(run(directory, count, torn))]
        asyncio.run(run(directory, 0, None))
        assert event_ids(directory) == written
        assert (verify(directory).rows, verify(directory).broken) == (len(written), None)


async def open_and_close(directory: Path) -> None:
    async with Ledger(directory, "replica"):
        pass


def test_kill_9_loses_no_acknowledged_row(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", append_until_killed.__name__, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE
        )
        assert process.stdout
        acknowledged = [process.stdout.readline() for _ in range(200)]
        process.kill()
        rest, _ = process.communicate()
        acknowledged += re.findall(rb".+\n", rest)
        asyncio.run(open_and_close(tmp_path))
        ids = event_ids(tmp_path)
        assert len(set(ids)) == len(ids)
        assert {line.decode().strip() for line in acknowledged} <= set(ids)
        assert (verify(tmp_path).rows, verify(tmp_path).broken) == (len(ids), None)
