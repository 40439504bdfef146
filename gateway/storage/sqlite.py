"""The state of one machine in one file: budgets and keys survive a restart, and several processes may share it.

What is asked while a transaction is under way is gathered and becomes the next one (group commit), so the price of a
commit is shared. Counters may lose the last moments when the power fails, as the ledger has what was billed. What
reservations do to the tables is in `sqlite_reservations`, what documents do in `sqlite_documents`.
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
from gateway.storage import sqlite_reservations as reservations
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
    Rejection,
    check_charges,
)
from gateway.storage.micro_batcher import MicroBatcher
from gateway.storage.sqlite_file import SqliteFile, in_transaction

BUSY_SHARE = 0.8  # of an operation's time is spent on waiting for other writers: less than all, to tell the reason
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
SCHEMAS = (TABLES, REPLICAS, NOTICES, documents.TABLES)  # what each version added

_Work = Callable[[sqlite3.Connection], Any]

_encode = msgspec.msgpack.Encoder().encode
_decode_key = msgspec.msgpack.Decoder(KeyRecord).decode


class SqliteStorage:
    """`sqlite:///relative.db` or `sqlite:////absolute.db`. `clock` only ages blobs and documents, and dates the
    opening."""

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
            raise ValueError("storage URL: SQLite needs a path, as in sqlite:///warmpath.db or sqlite:////var/lib/w.db")
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
        if await self._file.open() and self._owner:
            await self.expire_leases(self._owner, now=self._clock())

    async def close(self) -> None:
        await self._transactions.drain()
        await self._file.close()

    async def _run(self, batch: Sequence[_Work]) -> Sequence[Any]:
        return await self._file.do(partial(in_transaction, partial(self._all, batch)))

    def _all(self, batch: Sequence[_Work], db: sqlite3.Connection) -> list[Any]:
        """What each answers. A ValueError is one caller's own, and is raised before it writes."""
        now = self._clock()
        if not self._next_document_sweep - SWEEP_SECONDS <= now < self._next_document_sweep:
            self._next_document_sweep = now + SWEEP_SECONDS
            documents.sweep(now, db)  # whatever is asked for: nobody's words are kept beyond their time
        answers: list[Any] = []
        for work in batch:
            try:
                answers.append(work(db))
            except ValueError as error:
                answers.append(error)
        return answers

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        check_charges(reservation_id, charges)
        verdict: Grant | Rejection = await self._transactions.submit(
            partial(self._reserve, reservation_id, charges, lease_seconds, now)
        )
        return verdict

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
        held: bool = await self._transactions.submit(
            partial(reservations.extend_lease, reservation_id, lease_seconds, now)
        )
        return held

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        left: bool = await self._transactions.submit(partial(reservations.release_slots, reservation_id, now))
        return left

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        ended: bool = await self._transactions.submit(partial(reservations.settle, reservation_id, actual, now))
        return ended

    async def expire_leases(self, owner: str, *, now: float) -> int:
        released: int = await self._transactions.submit(partial(reservations.expire_leases, owner, now))
        return released

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        replicas: int = await self._transactions.submit(partial(_count_replicas, self._owner, now - alive_seconds, now))
        return replicas

    def _sweep(self, now: float, db: sqlite3.Connection) -> None:
        """What is over is ignored wherever it is read; this only keeps the file small."""
        self._next_sweep = now + SWEEP_SECONDS
        db.execute("DELETE FROM holds WHERE expires_at <= ?", (now,))
        db.execute("DELETE FROM reservations WHERE forget_at <= ?", (now,))
        db.execute("DELETE FROM buckets WHERE empty_at <= ?", (now,))
        db.execute("DELETE FROM accounts WHERE forget_at <= ?", (now,))
        db.execute("DELETE FROM blobs WHERE expires_at <= ?", (self._clock(),))

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._transactions.submit(partial(_get_blob, key, self._clock()))
        return value

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None:
        expires_at = self._clock() + ttl_seconds
        await self._transactions.submit(partial(_put_blob, key, value, expires_at, self._blob_bytes))

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        bounds = documents.Bounds(max_bytes, self._document_bytes)
        work = partial(documents.put, tenant, name, document, ttl_seconds, self._clock(), bounds)
        kept: bool = await self._transactions.submit(work)
        return kept

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

    async def publish_and_read(self, notice: bytes, after: str) -> tuple[list[bytes], str]:
        rows: list[tuple[int, bytes]] = await self._transactions.submit(partial(_exchange, notice, int(after or 0)))
        return [body for _, body in rows], str(rows[-1][0]) if rows else after


def _count_replicas(owner: str, since: float, now: float, db: sqlite3.Connection) -> int:
    if owner:
        db.execute("REPLACE INTO replicas VALUES (?, ?)", (owner, now))
    db.execute("DELETE FROM replicas WHERE seen_at <= ? OR seen_at > ?", (since, now + CLOCK_STEP_SECONDS))
    return int(db.execute("SELECT count(*) FROM replicas").fetchone()[0])


def _exchange(notice: bytes, after: int, db: sqlite3.Connection) -> list[tuple[int, bytes]]:
    if notice:
        number = db.execute("INSERT INTO notices (body) VALUES (?)", (notice,)).lastrowid or 0
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
    """The oldest make room. A new row's id is one more than the highest, so they are those with the lowest."""
    db.execute("DELETE FROM blobs WHERE key = ?", (key,))  # a REPLACE would not fire the trigger
    if len(key.encode()) + len(value) > blob_bytes:
        return
    db.execute("INSERT INTO blobs VALUES (?, ?, ?)", (key, value, expires_at))
    while db.execute("SELECT total FROM blob_bytes").fetchone()[0] > blob_bytes:
        db.execute("DELETE FROM blobs WHERE rowid = (SELECT min(rowid) FROM blobs)")


def _statements(script: str) -> list[str]:
    """`executescript` commits first, and so can not be part of a transaction."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements
