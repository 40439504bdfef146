"""The SQLite engine: restarts, group commit, other processes, sweeps, and files that it cannot use."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.storage.base import (
    DELETE_BATCH_SIZE,
    OPERATION_TIMEOUT_SECONDS,
    Charge,
    Document,
    Grant,
    KeyRecord,
    RateCharge,
    Rejection,
    SlotCharge,
    SpendCharge,
)
from gateway.storage.sqlite import SCHEMAS, SWEEP_SECONDS, SqliteStorage, _statements

NOW = 1_800_000_000.0


def storage_in(folder: Path, *, timeout_seconds: float = 60.0) -> SqliteStorage:
    """A storage with a long timeout by default: these tests must not fail on a busy machine."""
    return SqliteStorage(f"sqlite:///{folder / 'deep' / 'state.db'}", timeout_seconds=timeout_seconds)


async def test_budgets_keys_and_blobs_survive_a_restart(tmp_path: Path) -> None:
    charge = SpendCharge("t/budget/2026-11", 60, 100, 86_400.0)
    record = KeyRecord("id", "t", "hmac-sha256:00", "2026-11-20T00:00:00Z")
    first = storage_in(tmp_path)
    await first.open()
    await first.reserve("t/a", [charge], lease_seconds=30.0, now=NOW)
    await first.settle("t/a", [60], now=NOW)
    await first.put_key(record)
    await first.put("blob", b"value", ttl_seconds=60.0)
    await first.close()
    second = storage_in(tmp_path)
    await second.open()
    assert await second.reserve("t/b", [charge], lease_seconds=30.0, now=NOW) == Rejection(0, 40, None)
    assert await second.list_keys() == [record]
    assert await second.get("blob") == b"value"
    await second.close()


async def test_concurrent_operations_form_one_transaction(tmp_path: Path) -> None:
    storage = storage_in(tmp_path)
    await storage.open()
    statements: list[str] = []
    await storage._transactions.submit(lambda db: db.set_trace_callback(statements.append))
    charge = RateCharge("t/requests", 1, 1000, 60.0)
    await asyncio.gather(*(storage.reserve(f"t/{n}", [charge], lease_seconds=30.0, now=NOW) for n in range(100)))
    statements.remove("COMMIT")  # of the transaction in which tracing began
    assert [each for each in statements if each in ("BEGIN IMMEDIATE", "COMMIT")] == ["BEGIN IMMEDIATE", "COMMIT"]
    await storage.close()


async def test_a_file_locked_by_another_writer_is_unavailable(tmp_path: Path) -> None:
    storage = storage_in(tmp_path, timeout_seconds=OPERATION_TIMEOUT_SECONDS)
    await storage.open()
    slot = SlotCharge("t/concurrency", 2)  # two, since a reservation that timed out may still have taken effect
    other = sqlite3.connect(tmp_path / "deep" / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageUnavailable, match=r"locked|did not answer"):
        await storage.reserve("t/a", [slot], lease_seconds=30.0, now=NOW)
    other.execute("ROLLBACK")
    other.close()
    assert isinstance(await storage.reserve("t/b", [slot], lease_seconds=30.0, now=NOW), Grant)
    await storage.close()


async def test_a_value_error_does_not_roll_back_the_rest_of_its_transaction(tmp_path: Path) -> None:
    storage = storage_in(tmp_path)
    await storage.open()
    charge = RateCharge("t/requests", 1, 10, 60.0)
    outcomes = await asyncio.gather(
        *(storage.reserve(name, [charge], lease_seconds=30.0, now=NOW) for name in ("t/a", "t/a", "t/b")),
        return_exceptions=True,
    )
    assert outcomes[0] == Grant((9,))
    assert isinstance(outcomes[1], ValueError)
    assert outcomes[2] == Grant((8,))
    await storage.close()


async def test_expired_rows_are_deleted_from_the_file(tmp_path: Path) -> None:
    now = NOW
    storage = SqliteStorage(f"sqlite:///{tmp_path / 'deep' / 'state.db'}", owner="me", clock=lambda: now)
    await storage.open()
    charges: list[Charge] = [
        RateCharge("t/requests", 1, 10, 60.0),
        SlotCharge("t/concurrency", 9),
        SpendCharge("t/budget/2026-11-20", 5, 100, 86_400.0),
    ]
    await storage.reserve("t/a", charges, lease_seconds=30.0, now=now)
    await storage.reserve("t/b", charges, lease_seconds=30.0, now=now)
    await storage.settle("t/b", [1, 0, 5], now=now)
    await storage.put("blob", b"value", ttl_seconds=60.0)
    now += 2 * 86_400.0
    assert now > NOW + SWEEP_SECONDS
    await storage.reserve("t/c", [], lease_seconds=30.0, now=now)
    await storage.close()
    with sqlite3.connect(tmp_path / "deep" / "state.db") as file:
        tables = ("buckets", "accounts", "holds", "blobs", "reservations")
        rows = {table: file.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
        assert rows == {"buckets": 0, "accounts": 0, "holds": 0, "blobs": 0, "reservations": 1}
        assert file.execute("SELECT total FROM blob_bytes").fetchone() == (0,)
    file.close()


async def test_a_file_that_is_not_a_database_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_text("This is not a database, but it is long enough to be taken for one." * 100)
    with pytest.raises(StorageUnavailable, match="not a database"):
        await SqliteStorage(f"sqlite:///{path}").open()


async def test_a_file_of_a_later_schema_version_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA user_version = {len(SCHEMAS) + 1}")
    file.close()
    with pytest.raises(StorageUnavailable, match=f"version is {len(SCHEMAS) + 1}, but this program supports"):
        await SqliteStorage(f"sqlite:///{path}").open()


async def test_a_file_of_an_earlier_schema_version_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.db"
    path.parent.mkdir()
    with sqlite3.connect(path) as file:
        for statement in _statements(SCHEMAS[0]):
            file.execute(statement)
        file.execute("PRAGMA user_version = 1")
    file.close()
    storage = storage_in(tmp_path)
    await storage.open()
    assert await storage.count_replicas(alive_seconds=9.0, now=NOW) == 0
    await storage.close()


async def test_a_storage_that_is_not_open_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="not open"):
        await storage_in(tmp_path).get("anything")


async def test_a_replica_seen_before_the_clock_was_set_back_is_not_counted(tmp_path: Path) -> None:
    one, other = (SqliteStorage(f"sqlite:///{tmp_path / 'state.db'}", owner=owner) for owner in ("one", "other"))
    for each in (one, other):
        await each.open()
    now, later = 1_800_000_000.0, 1_800_018_000.0
    assert [await each.count_replicas(alive_seconds=30.0, now=later) for each in (one, other)] == [1, 2]
    assert await one.count_replicas(alive_seconds=30.0, now=now) == 1
    assert await other.count_replicas(alive_seconds=30.0, now=now + 1) == 2
    for each in (one, other):
        await each.close()


async def test_any_operation_deletes_expired_documents_from_the_file(tmp_path: Path) -> None:
    now = NOW
    path = tmp_path / "state.db"
    storage = SqliteStorage(f"sqlite:///{path}", timeout_seconds=60.0, clock=lambda: now)
    await storage.open()
    for number in range(DELETE_BATCH_SIZE + 1):
        await storage.put_document("t", f"short{number}", Document(b"head", b"body"), ttl_seconds=5.0, max_bytes=9999)
    await storage.put_document("t", "long", Document(b"head", b"body"), ttl_seconds=60.0, max_bytes=9999)
    with closing(sqlite3.connect(path)) as db:
        for left in (2, 1):
            now += SWEEP_SECONDS
            await storage.publish_and_read(b"", "")
            assert db.execute("SELECT count(*) FROM documents").fetchone() == (left,)
        assert db.execute("SELECT * FROM document_bytes").fetchall() == [("t", len("longheadbody"))]
    await storage.close()
