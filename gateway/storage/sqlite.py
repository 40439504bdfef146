"""The storage engine for one machine: a SQLite file that survives restarts and that several processes may share.

Operations that arrive while a transaction runs are queued and form the next transaction (group commit), so they share
the cost of a commit. `SqliteFile` runs the transactions in its thread. `sqlite_reservations`, `sqlite_slices`,
`sqlite_documents` and `sqlite_records` have the SQL of reservations, slices, documents and records. This module has the
other operations and the schema. A power failure may lose the most recent changes of the counters. That is acceptable,
because the ledger has the billed usage.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from gateway.storage import sqlite_documents as documents
from gateway.storage import sqlite_records as records
from gateway.storage import sqlite_reservations as reservations
from gateway.storage import sqlite_slices as slices
from gateway.storage.base import (
    CLOCK_STEP_SECONDS,
    DEFAULT_BLOB_BYTES,
    DISK_DOCUMENT_BYTES,
    OPERATION_TIMEOUT_SECONDS,
    PEER_MESSAGES_KEPT,
    PEER_MESSAGES_PER_READ,
    Charge,
    Document,
    Grant,
    KeyRecord,
    RecordChanges,
    Rejection,
    SliceGrant,
    SliceReport,
    StoredRecord,
)
from gateway.storage.checks import check_charges, check_report
from gateway.storage.micro_batcher import MicroBatcher
from gateway.storage.sqlite_file import SqliteFile, in_transaction

BUSY_SHARE = 0.8  # share of an operation's timeout for waiting for other writers; the rest is for reporting that reason
SWEEP_SECONDS = 10.0

TABLES = """
CREATE TABLE buckets (key TEXT PRIMARY KEY, state BLOB NOT NULL, empty_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE accounts (key TEXT PRIMARY KEY, spent INTEGER NOT NULL, forget_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE holds (
    key TEXT NOT NULL, reservation TEXT NOT NULL, amount INTEGER NOT NULL, expires_at REAL NOT NULL,
    PRIMARY KEY (key, reservation)
) WITHOUT ROWID;
CREATE TABLE reservations (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, charges BLOB NOT NULL, expires_at REAL NOT NULL, forget_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX reservations_by_owner ON reservations (owner);
CREATE TABLE blobs (key TEXT PRIMARY KEY, value BLOB NOT NULL, expires_at REAL NOT NULL);
CREATE TABLE blob_bytes (total INTEGER NOT NULL);
INSERT INTO blob_bytes VALUES (0);
CREATE TRIGGER blob_put AFTER INSERT ON blobs BEGIN
    UPDATE blob_bytes SET total = total + length(CAST(new.key AS BLOB)) + length(new.value);
END;
CREATE TRIGGER blob_gone AFTER DELETE ON blobs BEGIN
    UPDATE blob_bytes SET total = total - length(CAST(old.key AS BLOB)) - length(old.value);
END;
CREATE TABLE keys (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
"""
REPLICAS = "CREATE TABLE replicas (owner TEXT PRIMARY KEY, seen_at REAL NOT NULL) WITHOUT ROWID;\n"
NOTICES = "CREATE TABLE notices (number INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);\n"
SCHEMAS = (
    TABLES,
    REPLICAS,
    NOTICES,
    documents.TABLES,
    slices.TABLES,
    records.TABLES,
)  # what each schema version added; never change an old one

_Work = Callable[[sqlite3.Connection], Any]

_encode = msgspec.msgpack.Encoder().encode
_decode_key = msgspec.msgpack.Decoder(KeyRecord).decode


class SqliteStorage:
    """Storage engine for `sqlite:///relative.db` and `sqlite:////absolute.db` URLs.

    `clock` is used for the expiry of blobs and documents, and when `open` ends the owner's leases. All other operations
    use the caller's `now`. `blob_bytes` and `document_bytes` limit the blobs and the documents in the file.
    """

    is_shared: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        *,
        owner: str = "",
        blob_bytes: int = DEFAULT_BLOB_BYTES,
        document_bytes: int = DISK_DOCUMENT_BYTES,
        timeout_seconds: float = OPERATION_TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        path = url.removeprefix("sqlite:///")
        if path == url or not path:
            raise ValueError("storage URL: SQLite needs a path: sqlite:///relative.db or sqlite:////absolute.db")
        self._owner = owner
        self._blob_bytes = blob_bytes
        self._document_bytes = document_bytes
        self._clock = clock
        self._file = SqliteFile(
            Path(path),
            "sqlite",
            [_statements(script) for script in SCHEMAS],
            synchronous="NORMAL",
            busy_seconds=BUSY_SHARE * timeout_seconds,
        )
        self._next_sweep = 0.0
        self._next_document_sweep = 0.0
        self._transactions: MicroBatcher[_Work] = MicroBatcher(
            self._run, max_in_flight=1, timeout_seconds=timeout_seconds, store="the SQLite file"
        )

    async def open(self) -> None:
        """Open the file, and end the leases that the owner's previous process has left."""
        if await self._file.open() and self._owner:
            await self.expire_leases(self._owner, now=self._clock())

    async def close(self) -> None:
        """Finish the transactions in flight, and close the file."""
        await self._transactions.drain()
        await self._file.close()

    async def _run(self, batch: Sequence[_Work]) -> Sequence[Any]:
        return await self._file.run(partial(in_transaction, partial(self._run_batch, batch)))

    def _run_batch(self, batch: Sequence[_Work], db: sqlite3.Connection) -> list[Any]:
        """Run a batch in one transaction, and return the result of each operation.

        If an operation raises `ValueError`, only its caller gets it. The operation has then written nothing. Any other
        exception rolls back the complete batch.
        """
        now = self._clock()
        if not self._next_document_sweep - SWEEP_SECONDS <= now < self._next_document_sweep:
            self._next_document_sweep = now + SWEEP_SECONDS
            documents.sweep(now, db)  # in every batch, so documents are deleted soon after they expire
        results: list[Any] = []
        for work in batch:
            try:
                results.append(work(db))
            except ValueError as error:
                results.append(error)
        return results

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        """Reserve in a transaction. Also deletes expired rows, at most every SWEEP_SECONDS."""
        check_charges(reservation_id, charges)
        outcome: Grant | Rejection = await self._transactions.submit(
            partial(self._reserve, reservation_id, charges, lease_seconds, now)
        )
        return outcome

    def _reserve(
        self, reservation_id: str, charges: Sequence[Charge], lease_seconds: float, now: float, db: sqlite3.Connection
    ) -> Grant | Rejection:
        if not self._next_sweep - SWEEP_SECONDS <= now < self._next_sweep:
            self._sweep(now, db)
        return reservations.reserve(reservation_id, charges, self._owner, lease_seconds, now, db)

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        check_charges(reservation_id, charges)
        await self._transactions.submit(
            partial(reservations.force_reserve, reservation_id, charges, self._owner, lease_seconds, now)
        )

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        rooms: tuple[int, ...] = await self._transactions.submit(partial(reservations.remaining, charges, now))
        return rooms

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        extended: bool = await self._transactions.submit(
            partial(reservations.extend_lease, reservation_id, lease_seconds, now)
        )
        return extended

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        freed: bool = await self._transactions.submit(partial(reservations.release_slots, reservation_id, now))
        return freed

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        ended: bool = await self._transactions.submit(partial(reservations.settle, reservation_id, actual, now))
        return ended

    async def expire_leases(self, owner: str, *, now: float) -> int:
        released: int = await self._transactions.submit(partial(reservations.expire_leases, owner, now))
        return released

    async def report_slices(
        self, tenant: str, owner: str, report: SliceReport, *, lease_seconds: float, now: float
    ) -> SliceGrant:
        check_report(tenant, report)
        work = partial(self._report_slices, tenant, owner, report, lease_seconds, now)
        grant: SliceGrant = await self._transactions.submit(work)
        return grant

    def _report_slices(
        self, tenant: str, owner: str, report: SliceReport, lease_seconds: float, now: float, db: sqlite3.Connection
    ) -> SliceGrant:
        if not self._next_sweep - SWEEP_SECONDS <= now < self._next_sweep:
            self._sweep(now, db)
        return slices.report(tenant, owner, report, lease_seconds, now, db)

    async def settled_receipt(self, tenant: str, owner: str) -> str | None:
        work = partial(slices.settled_receipt, tenant, owner, self._clock())
        receipt: str | None = await self._transactions.submit(work)
        return receipt

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        """Report this owner and count the others, in a table of owners and the time of their last report."""
        replicas: int = await self._transactions.submit(partial(_count_replicas, self._owner, now - alive_seconds, now))
        return replicas

    def _sweep(self, now: float, db: sqlite3.Connection) -> None:
        """Delete expired rows to keep the file small. Reads ignore expired rows."""
        self._next_sweep = now + SWEEP_SECONDS
        slices.sweep(now, db)
        db.execute("DELETE FROM holds WHERE expires_at <= ?", (now,))
        db.execute("DELETE FROM reservations WHERE forget_at <= ?", (now,))
        db.execute("DELETE FROM buckets WHERE empty_at <= ?", (now,))
        db.execute("DELETE FROM accounts WHERE forget_at <= ?", (now,))
        db.execute("DELETE FROM blobs WHERE expires_at <= ?", (self._clock(),))

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._transactions.submit(partial(_get_blob, key, self._clock()))
        return value

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None:
        """Store a blob. Deletes the oldest blobs until the new blob fits. A blob above the limit is not stored."""
        expires_at = self._clock() + ttl_seconds
        await self._transactions.submit(partial(_put_blob, key, value, expires_at, self._blob_bytes))

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        bounds = documents.Bounds(max_bytes, self._document_bytes)
        work = partial(documents.put, tenant, name, document, ttl_seconds, self._clock(), bounds)
        stored: bool = await self._transactions.submit(work)
        return stored

    async def get_document(self, tenant: str, name: str) -> Document | None:
        found: Document | None = await self._transactions.submit(partial(documents.get, tenant, name, self._clock()))
        return found

    async def get_heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        work = partial(documents.heads, tenant, names, self._clock())
        found: list[bytes | None] = await self._transactions.submit(work)
        return found

    async def delete_document(self, tenant: str, name: str) -> bool:
        deleted: bool = await self._transactions.submit(partial(documents.delete, tenant, name, self._clock()))
        return deleted

    async def list_documents(
        self, tenant: str, folder: str, *, after: str | None = None, limit: int, newest_first: bool = False
    ) -> list[str]:
        work = partial(documents.names, tenant, folder, after, limit, self._clock(), newest_first=newest_first)
        found: list[str] = await self._transactions.submit(work)
        return found

    async def keep_folder(self, tenant: str, folder: str, *, ttl_seconds: float) -> None:
        await self._transactions.submit(partial(documents.keep_folder, tenant, folder, ttl_seconds, self._clock()))

    async def delete_some_documents(self, tenant: str) -> int:
        deleted: int = await self._transactions.submit(partial(documents.delete_some, tenant))
        return deleted

    async def put_key(self, record: KeyRecord) -> None:
        row = (record.id, _encode(record))
        await self._transactions.submit(lambda db: db.execute("REPLACE INTO keys VALUES (?, ?)", row).rowcount)

    async def change_key(self, record: KeyRecord) -> bool:
        changed: bool = await self._transactions.submit(partial(_change_key, record))
        return changed

    async def get_key(self, key_id: str) -> KeyRecord | None:
        query = "SELECT record FROM keys WHERE id = ?"
        row = await self._transactions.submit(lambda db: db.execute(query, (key_id,)).fetchone())
        return None if row is None else _decode_key(row[0])

    async def list_keys(self) -> list[KeyRecord]:
        query = "SELECT record FROM keys ORDER BY id"
        rows = await self._transactions.submit(lambda db: db.execute(query).fetchall())
        return [_decode_key(record) for (record,) in rows]

    async def change_record(self, record: StoredRecord) -> bool:
        changed: bool = await self._transactions.submit(partial(records.change, record))
        return changed

    async def records_since(self, position: str) -> RecordChanges:
        found: RecordChanges = await self._transactions.submit(partial(records.since, position))
        return found

    async def publish_and_read(self, message: bytes, after: str) -> tuple[list[bytes], str]:
        """Publish by INSERT and read by SELECT on one table. The position is a row number."""
        work = partial(_publish_and_read, message, int(after or 0))
        rows: list[tuple[int, bytes]] = await self._transactions.submit(work)
        return [body for _, body in rows], str(rows[-1][0]) if rows else after


def _count_replicas(owner: str, since: float, now: float, db: sqlite3.Connection) -> int:
    if owner:
        db.execute("REPLACE INTO replicas VALUES (?, ?)", (owner, now))
    db.execute("DELETE FROM replicas WHERE seen_at <= ? OR seen_at > ?", (since, now + CLOCK_STEP_SECONDS))
    return int(db.execute("SELECT count(*) FROM replicas").fetchone()[0])


def _publish_and_read(message: bytes, after: int, db: sqlite3.Connection) -> list[tuple[int, bytes]]:
    if message:
        number = db.execute("INSERT INTO notices (body) VALUES (?)", (message,)).lastrowid or 0
        db.execute("DELETE FROM notices WHERE number <= ?", (number - PEER_MESSAGES_KEPT,))
    query = "SELECT number, body FROM notices WHERE number > ? ORDER BY number LIMIT ?"
    return db.execute(query, (after, PEER_MESSAGES_PER_READ)).fetchall()


def _change_key(record: KeyRecord, db: sqlite3.Connection) -> bool:
    row = db.execute("SELECT record FROM keys WHERE id = ?", (record.id,)).fetchone()
    if record.revision != (0 if row is None else _decode_key(row[0]).revision + 1):
        return False
    db.execute("REPLACE INTO keys VALUES (?, ?)", (record.id, _encode(record)))
    return True


def _get_blob(key: str, now: float, db: sqlite3.Connection) -> bytes | None:
    row = db.execute("SELECT value FROM blobs WHERE key = ? AND expires_at > ?", (key, now)).fetchone()
    return None if row is None else row[0]


def _put_blob(key: str, value: bytes, expires_at: float, blob_bytes: int, db: sqlite3.Connection) -> None:
    """Store a blob, and delete the oldest blobs while all exceed `blob_bytes`. The oldest has the lowest rowid."""
    db.execute("DELETE FROM blobs WHERE key = ?", (key,))  # a REPLACE would not fire the DELETE trigger
    if len(key.encode()) + len(value) > blob_bytes:
        return
    db.execute("INSERT INTO blobs VALUES (?, ?, ?)", (key, value, expires_at))
    while db.execute("SELECT total FROM blob_bytes").fetchone()[0] > blob_bytes:
        db.execute("DELETE FROM blobs WHERE rowid = (SELECT min(rowid) FROM blobs)")


def _statements(script: str) -> list[str]:
    """Split a script into statements. `executescript` commits first, so it cannot be part of a transaction."""
    statements, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            statements.append(statement)
            statement = ""
    return statements
