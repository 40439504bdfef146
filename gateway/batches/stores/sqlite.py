"""Batch API storage in one SQLite file, which several processes of one machine may share.

Every write is followed by an fsync, so results survive a power failure. A lost result would have to be computed a
second time. The counters in `gateway.storage.sqlite` need no fsync. Callers batch their writes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from gateway.batches.records import Batch, File, LineResult, new_id
from gateway.batches.stores.base import CHUNK_BYTES, UNFINISHED_SECONDS, Change
from gateway.storage.sqlite_file import SqliteFile, WorkResult, in_transaction

BUSY_SECONDS = 5.0  # how long to wait for the transaction of another process

SCHEMA = (
    """CREATE TABLE contents (
        file TEXT NOT NULL, start INTEGER NOT NULL, bytes BLOB NOT NULL, PRIMARY KEY (file, start)
    ) WITHOUT ROWID""",
    """CREATE TABLE files (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
        expires_at INTEGER NOT NULL, record BLOB NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX files_by_tenant ON files (tenant, id)",
    "CREATE INDEX files_by_expiry ON files (expires_at)",
    "CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, over INTEGER NOT NULL, record BLOB NOT NULL)",
    "CREATE INDEX batches_by_tenant ON batches (tenant, id)",
    "CREATE INDEX batches_by_end ON batches (over, id)",
    """CREATE TABLE results (
        batch TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, content BLOB NOT NULL, owed BLOB,
        PRIMARY KEY (batch, line)
    ) WITHOUT ROWID""",
    "CREATE INDEX results_owed ON results (batch) WHERE owed IS NOT NULL",
)

_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(Batch).decode
_file = msgspec.msgpack.Decoder(File).decode


class SqliteBatchStore:
    """`BatchStore` in the SQLite file at `path`."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, "batches", (SCHEMA,), synchronous="FULL", busy_seconds=BUSY_SECONDS)

    async def open(self) -> None:
        """Open the file, and delete the contents that killed uploads left behind."""
        if await self._file.open():
            unfinished = new_id("file-", time.time() - UNFINISHED_SECONDS)
            query = "DELETE FROM contents WHERE file < ? AND file NOT IN (SELECT id FROM files)"
            await self._do(lambda db: db.execute(query, (unfinished,)).rowcount)

    async def close(self) -> None:
        await self._file.close()

    async def _do(self, work: Callable[[sqlite3.Connection], WorkResult], *, writes: bool = True) -> WorkResult:
        return await self._file.run(partial(in_transaction, work) if writes else work)

    # Contents

    async def append(self, content: str, chunk: bytes) -> None:
        def work(db: sqlite3.Connection) -> None:
            query = "SELECT start + length(bytes) FROM contents WHERE file = ? ORDER BY start DESC LIMIT 1"
            (end,) = db.execute(query, (content,)).fetchone() or (0,)
            db.execute("INSERT INTO contents VALUES (?, ?, ?)", (content, end, chunk))

        await self._do(work)

    async def read(self, content: str, offset: int, length: int) -> bytes:
        query = "SELECT start, bytes FROM contents WHERE file = ? AND start > ? AND start < ? ORDER BY start"
        # A stored chunk has at most CHUNK_BYTES, so one that starts earlier cannot reach `offset`.
        bounds = (content, offset - CHUNK_BYTES, offset + length)
        rows = await self._do(lambda db: db.execute(query, bounds).fetchall(), writes=False)
        parts = (part[max(0, offset - start) : offset + length - start] for start, part in rows)
        return b"".join(parts)

    async def delete_content(self, content: str) -> None:
        await self._do(lambda db: db.execute("DELETE FROM contents WHERE file = ?", (content,)).rowcount)

    # Files

    async def add_file(self, file: File, *, max_stored_bytes: int) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            query = "SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant = ?"
            (stored,) = db.execute(query, (file.tenant,)).fetchone()
            if stored + file.bytes > max_stored_bytes:
                return False
            _insert_file(file, db)
            return True

        return await self._do(work)

    async def file(self, file_id: str) -> File | None:
        query = "SELECT record FROM files WHERE id = ?"
        row = await self._do(lambda db: db.execute(query, (file_id,)).fetchone(), writes=False)
        return None if row is None else _file(row[0])

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[File]:
        query = f"""SELECT record FROM files WHERE tenant = :tenant AND (:purpose IS NULL OR purpose = :purpose)
            AND (:after IS NULL OR id {"<" if newest_first else ">"} :after)
            ORDER BY id {"DESC" if newest_first else "ASC"} LIMIT :limit"""
        values = {"tenant": tenant, "purpose": purpose, "after": after, "limit": limit}
        rows = await self._do(lambda db: db.execute(query, values).fetchall(), writes=False)
        return [_file(record) for (record,) in rows]

    async def delete_file(self, file: File) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            db.execute("DELETE FROM contents WHERE file = ?", (file.id,))
            return db.execute("DELETE FROM files WHERE id = ?", (file.id,)).rowcount > 0

        return await self._do(work)

    async def expired_files(self, now: float, limit: int) -> list[File]:
        query = "SELECT record FROM files WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"
        rows = await self._do(lambda db: db.execute(query, (now, limit)).fetchall(), writes=False)
        return [_file(record) for (record,) in rows]

    # Batches

    async def add_batch(self, batch: Batch, *, max_open: int) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            query = "SELECT count(*) FROM batches WHERE over = 0 AND tenant = ?"
            if db.execute(query, (batch.tenant,)).fetchone()[0] >= max_open:
                return False
            _save_batch(batch, db)
            return True

        return await self._do(work)

    async def batch(self, batch_id: str) -> Batch | None:
        return await self._do(lambda db: _load_batch(batch_id, db), writes=False)

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch]:
        query = """SELECT record FROM batches WHERE tenant = :tenant AND (:after IS NULL OR id < :after)
            ORDER BY id DESC LIMIT :limit"""
        values = {"tenant": tenant, "after": after, "limit": limit}
        rows = await self._do(lambda db: db.execute(query, values).fetchall(), writes=False)
        return [_batch(record) for (record,) in rows]

    async def open_batches(self) -> list[Batch]:
        query = "SELECT record FROM batches WHERE over = 0 ORDER BY id"
        rows = await self._do(lambda db: db.execute(query).fetchall(), writes=False)
        return [_batch(record) for (record,) in rows]

    async def latest_batches(self, limit: int) -> list[Batch]:
        query = "SELECT record FROM batches ORDER BY id DESC LIMIT ?"
        rows = await self._do(lambda db: db.execute(query, (limit,)).fetchall(), writes=False)
        return [_batch(record) for (record,) in rows]

    async def ended_before(self, batch_id: str, limit: int) -> list[Batch]:
        query = "SELECT record FROM batches WHERE over = 1 AND id < ? ORDER BY id LIMIT ?"
        rows = await self._do(lambda db: db.execute(query, (batch_id, limit)).fetchall(), writes=False)
        return [_batch(record) for (record,) in rows]

    async def update(
        self,
        batch_id: str,
        change: Change,
        *,
        results: Sequence[LineResult] = (),
        recorded: Sequence[int] = (),
        files: Sequence[File] = (),
    ) -> Batch | None:
        def work(db: sqlite3.Connection) -> Batch | None:
            before = _load_batch(batch_id, db)
            after = None if before is None else change(before)
            if after is None:
                return None
            _save_batch(after, db)
            rows = [(batch_id, each.line, each.ok, each.content, each.receipt or None) for each in results]
            db.executemany("INSERT INTO results VALUES (?, ?, ?, ?, ?)", rows)
            db.executemany(
                "UPDATE results SET owed = NULL WHERE batch = ? AND line = ?", [(batch_id, line) for line in recorded]
            )
            for file in files:
                _insert_file(file, db)
            if after.has_ended:
                db.execute("DELETE FROM results WHERE batch = ?", (batch_id,))
            return after

        return await self._do(work)

    async def delete_batch(self, batch: Batch) -> None:
        await self._do(lambda db: db.execute("DELETE FROM batches WHERE id = ? AND over = 1", (batch.id,)).rowcount)

    async def finished_lines(self, batch_id: str) -> list[int]:
        query = "SELECT line FROM results WHERE batch = ?"
        rows = await self._do(lambda db: db.execute(query, (batch_id,)).fetchall(), writes=False)
        return [line for (line,) in rows]

    async def unrecorded_receipts(self, batch_id: str) -> dict[int, bytes]:
        query = "SELECT line, owed FROM results WHERE batch = ? AND owed IS NOT NULL"
        return dict(await self._do(lambda db: db.execute(query, (batch_id,)).fetchall(), writes=False))

    async def results(self, batch_id: str, *, after_line: int, limit: int) -> list[LineResult]:
        query = "SELECT line, ok, content FROM results WHERE batch = ? AND line > ? ORDER BY line LIMIT ?"
        rows = await self._do(lambda db: db.execute(query, (batch_id, after_line, limit)).fetchall(), writes=False)
        return [LineResult(line, bool(ok), content) for line, ok, content in rows]


def _insert_file(file: File, db: sqlite3.Connection) -> None:
    row = (file.id, file.tenant, file.purpose, file.bytes, file.expires_at, _encode(file))
    db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)


def _load_batch(batch_id: str, db: sqlite3.Connection) -> Batch | None:
    row = db.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return None if row is None else _batch(row[0])


def _save_batch(batch: Batch, db: sqlite3.Connection) -> None:
    db.execute("REPLACE INTO batches VALUES (?, ?, ?, ?)", (batch.id, batch.tenant, batch.has_ended, _encode(batch)))
