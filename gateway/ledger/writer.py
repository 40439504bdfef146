"""The one writer of a replica's chain.

A receipt is written with a single `write` before the end of its answer is sent, so that a killed process has a row
for every answer that was finished; and it is on disk, fsynced together with its neighbours, when `durable` returns.

  what can go wrong                    what stays true
  the process is killed                every row that `append` returned from is there; rows are whole
  the machine loses power              every row that `durable` returned after is there; the torn end is set aside
  the disk is full, a write fails      no half row stands before a good one; `ok` is False until writing works again
  an fsync fails                       nothing is known to be durable any more: `ok` stays False until a restart
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from gateway.errors import LedgerUnavailable
from gateway.ledger.chain import GENESIS, RowError, UnknownVersion, check_row, encode_row, segment_name, segments
from gateway.types import Receipt

SEGMENT_BYTES = 32 * 1024 * 1024  # about 30,000 rows; the last segment is read whole when the ledger is opened
GROUP_COMMIT_SECONDS = 0.05  # how long rows wait for neighbours to share an fsync with; a power cut reaches back so far
PROBE_SECONDS = 1.0  # how often a ledger that could not write tries whether it can again
PROBE_BYTES = 64 * 1024  # room that must be there then

_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

log = logging.getLogger(__name__)


class Ledger:
    """Appends receipts to `directory/replica`. Opened before use, closed after; belongs to one event loop."""

    def __init__(self, directory: Path, replica: str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        if not _REPLICA.fullmatch(replica):
            raise ValueError(
                f"the replica's name {replica!r} names a folder: letters, digits, dots, dashes, underscores"
            )
        self._chain = directory / replica
        self._segment_bytes = segment_bytes
        self._lock = -1
        self._segment = -1
        self._segment_number = 0
        self._segment_size = 0
        self._full_segments: list[int] = []  # still to be fsynced and closed, by the next commit
        self._head = GENESIS
        self._written = 0  # rows since opening
        self._syncing = 0  # of these, in an fsync that has begun
        self._durable = 0  # of these, on disk
        self._fault: str | None = None
        self._beyond_repair = False
        self._committing = asyncio.Event()  # set when the fsync that has begun is over
        self._gathering = asyncio.Event()  # set when the one after it is
        self._committer: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        # One thread: an fsync may take long, and must neither wait for other work nor run beside another fsync.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    @property
    def ok(self) -> bool:
        """Whether the next receipt can be written. Where it is False, a call must be refused before it costs anything
        (see `check`), and the gateway is not ready.
        """
        return self._fault is None

    @property
    def rows_written(self) -> int:
        """Since the ledger was opened."""
        return self._written

    def check(self) -> None:
        """Raise `LedgerUnavailable` where `ok` is False."""
        if self._fault is not None:
            raise LedgerUnavailable(self._fault)

    def open(self) -> None:
        """Take the folder, set a torn end aside, continue the chain. Raises `LedgerUnavailable` where it can not."""
        try:
            self._chain.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._recover()
        except LedgerUnavailable:
            self._let_go()
            raise
        except OSError as error:
            self._let_go()
            raise LedgerUnavailable(f"the ledger {self._chain} can not be opened: {error}") from error

    def append(self, receipt: Receipt) -> None:
        """Write the receipt's row. It outlives this process from here on, and a power cut once it is `durable`.

        Raises `LedgerUnavailable` where it could not be written: then there is no trace of it in the ledger, and all
        of it in the log.
        """
        row, digest = encode_row(receipt, self._head)
        try:
            if self._beyond_repair:
                self.check()
            if self._segment_size and self._segment_size + len(row) > self._segment_bytes:
                self._start_segment()
            self._write(row)
        except LedgerUnavailable:
            log.error("a receipt is not in the ledger: %s", row.decode().rstrip())
            raise
        self._head = digest
        self._segment_size += len(row)
        self._written += 1
        if self._committer is None:
            self._committer = asyncio.get_running_loop().create_task(self._commit(), name="ledger commit")

    async def durable(self) -> None:
        """Return when every row appended until now is on disk. Raises `LedgerUnavailable` if that can not be said."""
        rows = self._written
        if self._durable < rows and not self._beyond_repair:
            await (self._gathering if rows > self._syncing else self._committing).wait()
        if self._durable < rows:
            self.check()

    async def close(self) -> None:
        """Make everything durable and let go of the folder. Safe to call twice."""
        if self._committer is not None:
            await self._committer
        if self._prober is not None:
            self._prober.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._prober
        self._disk.shutdown()
        self._let_go()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Writing

    def _write(self, row: bytes) -> None:
        try:
            written = os.write(self._segment, row)
        except OSError as error:
            self._fail(f"the ledger can not be written: {error.strerror}")
        if written == len(row):
            return
        try:
            os.ftruncate(self._segment, self._segment_size)
        except OSError:
            self._beyond_repair = True  # the half row stays; opening the ledger again cuts it off
        self._fail("the ledger can not be written: no room for a whole row")

    def _start_segment(self) -> None:
        path = self._chain / segment_name(self._segment_number + 1)
        try:
            segment = _open_to_append(path, os.O_EXCL)
        except OSError as error:
            self._fail(f"the ledger can not start the segment {path}: {error.strerror}")
        self._full_segments.append(self._segment)
        self._segment, self._segment_size = segment, 0
        self._segment_number += 1

    def _fail(self, fault: str) -> NoReturn:
        if self._fault is None:
            log.error("%s", fault)
        self._fault = fault
        if self._prober is None and not self._beyond_repair:
            self._prober = asyncio.get_running_loop().create_task(self._probe(), name="ledger probe")
        raise LedgerUnavailable(fault)

    async def _probe(self) -> None:
        """Try a write beside the ledger until one works."""
        loop = asyncio.get_running_loop()
        while self._fault is not None and not self._beyond_repair:
            await asyncio.sleep(PROBE_SECONDS)
            with contextlib.suppress(OSError):
                await loop.run_in_executor(self._disk, _try_to_write, self._chain / "probe")
                log.warning("the ledger can be written again")
                self._fault = None
        self._prober = None

    # Group commit

    async def _commit(self) -> None:
        """Fsync until everything written is on disk; then end. Rows that come in meanwhile share the next fsync."""
        loop = asyncio.get_running_loop()
        while self._durable < self._written and not self._beyond_repair:
            await asyncio.sleep(GROUP_COMMIT_SECONDS)
            self._syncing = rows = self._written
            self._committing, self._gathering = self._gathering, asyncio.Event()
            full, self._full_segments = self._full_segments, []
            try:
                await loop.run_in_executor(self._disk, _sync, full, self._segment, self._chain)
                self._durable = rows
            except OSError as error:
                # The kernel may have dropped the pages and will call the next fsync a success: no second try.
                self._fault = f"the ledger's rows can not be made durable: {error.strerror}; restart the gateway"
                self._beyond_repair = True
                self._gathering.set()
                log.critical("%s", self._fault)
            self._committing.set()
        self._committer = None

    # Opening

    def _take_lock(self) -> None:
        self._lock = os.open(self._chain / "lock", os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 20, 0).decode()
            os.close(self._lock)
            self._lock = -1
            raise LedgerUnavailable(
                f"the ledger {self._chain} is being written by process {owner}; "
                "give every gateway a replica name of its own (WARMPATH_REPLICA)"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _let_go(self) -> None:
        for file in (*self._full_segments, self._segment, self._lock):
            if file >= 0:
                os.close(file)
        self._full_segments, self._segment, self._lock = [], -1, -1

    def _recover(self) -> None:
        files = segments(self._chain) or [self._chain / segment_name(1)]
        self._segment_number = int(files[-1].stem)
        self._segment = _open_to_append(files[-1])
        self._segment_size, head = _good_end(files[-1])
        if os.fstat(self._segment).st_size > self._segment_size:
            _set_aside(files[-1], self._segment, self._segment_size)
        if head is None:  # it had just begun a new segment
            head = next((head for file in reversed(files[:-1]) if (head := _good_end(file)[1])), GENESIS)
        self._head = head
        _sync([], self._segment, self._chain)
        _sync_folder(self._chain)


def _good_end(file: Path) -> tuple[int, str | None]:
    """(where the last row that is as it was written ends, its hash); (0, None) if there is none."""
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        try:
            return end, check_row(content[start:end])[1]
        except UnknownVersion as error:
            raise LedgerUnavailable(f"the ledger can not be continued: {file}: {error}") from error
        except RowError:
            end = start
    return 0, None


def _set_aside(file: Path, segment: int, good_end: int) -> None:
    """Move what comes after the last good row to `<file>.torn`: there first, and only then away from here."""
    with file.open("rb") as source, file.with_name(file.name + ".torn").open("ab") as torn:
        source.seek(good_end)
        torn_bytes = torn.write(source.read())
        torn.flush()
        os.fsync(torn.fileno())
    os.ftruncate(segment, good_end)
    log.warning("%s ended in %d bytes that are no row; they are in %s now", file, torn_bytes, torn.name)


def _open_to_append(file: Path, flags: int = 0) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags, 0o640)


def _sync(full: list[int], segment: int, folder: Path) -> None:
    for file in full:
        os.fsync(file)
        os.close(file)
    os.fsync(segment)
    if full:
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Makes the names of new files durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_to_write(file: Path) -> None:
    try:
        with file.open("wb") as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    finally:
        file.unlink(missing_ok=True)
