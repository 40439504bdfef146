"""Opens a SQLite file that several processes may share, updates its schema, and runs transactions in one thread.

Transactions start with `BEGIN IMMEDIATE`, so only one process writes at a time. The journal mode is WAL. With
`synchronous=NORMAL`, a killed process loses no committed transaction, but a power failure may lose the most recent
ones. `FULL` costs an fsync per transaction and loses nothing. The SQLite storage engine and the Batch API's store use
this module.
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
from gateway.core.private_files import restrict

OPEN_TIMEOUT_SECONDS = 5.0  # time to wait, because another process may be creating the schema
WAL_RETRY_SECONDS = 0.02

WorkResult = TypeVar("WorkResult")


class SqliteFile:
    """One connection to a SQLite file. Only one thread, named `name`, uses the connection.

    `schemas` has the statements that each schema version added. A transaction waits up to `busy_seconds` for the
    transactions of other processes.
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
        self._connection: sqlite3.Connection | None = None  # used only by the thread

    async def open(self) -> bool:
        """Open the file and update its schema. Returns False if it is already open. Raises `StorageUnavailable`."""
        if self._thread is not None:
            return False
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._connect)
        except (OSError, sqlite3.Error) as error:
            thread.shutdown(wait=False)
            raise StorageUnavailable(f"the SQLite file {self._path} cannot be opened: {error}") from error
        self._thread = thread
        return True

    async def close(self) -> None:
        """Close the connection and end the thread. Idempotent."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await asyncio.get_running_loop().run_in_executor(thread, self._disconnect)
            thread.shutdown(wait=False)

    async def run(self, work: Callable[[sqlite3.Connection], WorkResult]) -> WorkResult:
        """Run `work` in the thread and return its result. A transaction that `work` leaves open is rolled back.

        Raises `StorageUnavailable` for errors of SQLite, and passes on other exceptions of `work`.
        """
        if self._thread is None:
            raise StorageUnavailable(f"the SQLite file {self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _connect(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        restrict(*(self._path.with_name(self._path.name + suffix) for suffix in ("", "-wal", "-shm")))
        db = sqlite3.connect(self._path, timeout=OPEN_TIMEOUT_SECONDS, isolation_level=None)
        _use_wal(db)
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(self._schemas):
            db.close()
            raise sqlite3.DatabaseError(
                f"its schema version is {version}, but this program supports only up to {len(self._schemas)}"
            )
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

    def _run(self, work: Callable[[sqlite3.Connection], WorkResult]) -> WorkResult:
        db = self._connection
        if db is None:
            raise StorageUnavailable(f"the SQLite file {self._path} is not open")
        try:
            return work(db)
        except sqlite3.Error as error:
            raise StorageUnavailable(f"the SQLite file {self._path} cannot be used: {error}") from error
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch to WAL mode. Retries the statement, because SQLite's busy timeout does not cover it.

    The statement fails at once while another process changes the mode, or recovers the log of a dead process.
    """
    until = time.monotonic() + OPEN_TIMEOUT_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(WAL_RETRY_SECONDS)


def in_transaction(work: Callable[[sqlite3.Connection], WorkResult], db: sqlite3.Connection) -> WorkResult:
    """Run `work` in a write transaction. If `work` raises, `SqliteFile.run` rolls back."""
    db.execute("BEGIN IMMEDIATE")
    result = work(db)
    db.execute("COMMIT")
    return result
