"""One SQLite file that several processes of a machine may share: its schema, and the thread that owns the connection.

`BEGIN IMMEDIATE` makes a transaction the only writer of all processes. With WAL and `synchronous=NORMAL` a killed
process loses nothing that was answered, and a power cut the last moments; `FULL` costs an fsync each time, and loses
nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from gateway.core.errors import StorageUnavailable

OPEN_TIMEOUT_SECONDS = 5.0  # another process may be making the schema
LOOK_AGAIN_SECONDS = 0.02

Answer = TypeVar("Answer")


class SqliteFile:
    """`schemas` has the statements that each version of the schema added. Other processes' transactions are waited for
    `busy_seconds` long. `name` is the thread's.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        schemas: Sequence[Sequence[str]],
        *,
        synchronous: Literal["NORMAL", "FULL"],
        busy_seconds: float,
    ) -> None:
        self._path = path
        self._name = name
        self._schemas = schemas
        self._synchronous = synchronous
        self._busy_seconds = busy_seconds
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None  # the thread's alone

    async def open(self) -> bool:
        """False where it was open. Raises `StorageUnavailable`."""
        if self._thread is not None:
            return False
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._connect)
        except (OSError, sqlite3.Error) as error:
            thread.shutdown(wait=False)
            raise StorageUnavailable(f"the SQLite file {self._path} can not be opened: {error}") from error
        self._thread = thread
        return True

    async def close(self) -> None:
        """Safe to call twice."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await asyncio.get_running_loop().run_in_executor(thread, self._disconnect)
            thread.shutdown(wait=False)

    async def do(self, work: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """What `work` answers, which runs in the thread. A transaction that it leaves open is rolled back. Raises
        `StorageUnavailable`, and what `work` raises.
        """
        if self._thread is None:
            raise StorageUnavailable(f"the SQLite file {self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._work, work)

    def _connect(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self._path, timeout=OPEN_TIMEOUT_SECONDS, isolation_level=None)
        _use_wal(db)
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(self._schemas):
            db.close()
            raise sqlite3.DatabaseError(f"its schema has version {version}, this program knows {len(self._schemas)}")
        for statements in self._schemas[version:]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(self._schemas)}")
        db.execute("COMMIT")
        db.execute(f"PRAGMA busy_timeout = {round(self._busy_seconds * 1000)}")
        self._connection = db

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _work(self, work: Callable[[sqlite3.Connection], Answer]) -> Answer:
        db = self._connection
        if db is None:
            raise StorageUnavailable(f"the SQLite file {self._path} is not open")
        try:
            return work(db)
        except sqlite3.Error as error:
            raise StorageUnavailable(f"the SQLite file {self._path} can not be used: {error}") from error
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


def _use_wal(db: sqlite3.Connection) -> None:
    """The one statement for which SQLite does not wait by itself: while another process changes the mode, or looks
    through a log that was left behind, it is refused at once.
    """
    until = time.monotonic() + OPEN_TIMEOUT_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(LOOK_AGAIN_SECONDS)


def in_transaction(work: Callable[[sqlite3.Connection], Answer], db: sqlite3.Connection) -> Answer:
    db.execute("BEGIN IMMEDIATE")
    answer = work(db)
    db.execute("COMMIT")
    return answer
