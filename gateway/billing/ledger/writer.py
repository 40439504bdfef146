"""The one writer of a replica's chain.

A row is written with a single `write`: before a server is asked (`open_call`), and before the end of an answer is sent
(`append`). So a killed process has a row for every answer that was finished, and one for each that was begun; and
rows are on disk, fsynced together with their neighbours, when `durable` returns.

  what can go wrong                    what stays true
  the process is killed                every row written is there, and whole; `unfinished` has what lacks its receipt
  the machine loses power              every row that `durable` returned after is there; the torn end is set aside
  the disk is full                     what is open is closed, in room taken before; nothing is opened, `ok` is False
  a write fails                        no half row stands before a good one; `ok` is False until writing works again
  an fsync fails                       nothing is known to be durable any more: `ok` stays False until a restart
  the disk is slow                     nothing is opened, `ok` is False, while MAX_NOT_DURABLE rows wait for their fsync
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from gateway.billing.ledger.appender import SEGMENT_BYTES, Appender, sync
from gateway.billing.ledger.retention import remove_old_segments
from gateway.billing.ledger.rows import Correction, OpenCall, UnbilledWork
from gateway.core.errors import LedgerUnavailable
from gateway.types import Receipt

GROUP_COMMIT_SECONDS = 0.05  # how long rows wait for neighbours to share an fsync with; a power cut reaches back so far
MAX_NOT_DURABLE = 100_000  # rows: half a minute of two thousand calls a second
PROBE_SECONDS = 1.0  # how often a ledger that could not write tries whether it can again
PROBE_BYTES = 64 * 1024  # room that must be there then

_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

log = logging.getLogger(__name__)


class Ledger:
    """Appends rows to `directory/replica`. Opened before use, closed after; belongs to one event loop.

    Whole segments whose rows are all older than `keep_days` are removed, the oldest first; None keeps everything.
    `may_remove` has the last word on each segment's number: not before it was shipped, say.
    """

    def __init__(
        self, directory: Path, replica: str, *, segment_bytes: int = SEGMENT_BYTES, keep_days: float | None = None
    ) -> None:
        if not _REPLICA.fullmatch(replica):
            raise ValueError(
                f"the replica's name {replica!r} names a folder: letters, digits, dots, dashes, underscores"
            )
        self.folder = directory / replica
        self.may_remove_segment: Callable[[int], bool] = lambda segment_number: True
        self._keep_days = keep_days
        self._chain = Appender(self.folder, segment_bytes=segment_bytes)
        self._written = 0  # rows since opening
        self._receipts = 0
        self._syncing = 0  # of the rows, those in an fsync that has begun
        self._durable = 0  # of the rows, those on disk
        self._durable_at = (0, 0)  # the segment's number and size, up to where everything is on disk
        self._fault: str | None = None
        self._needs_restart = False
        self._committing = asyncio.Event()  # set when the fsync that has begun is over
        self._gathering = asyncio.Event()  # set when the one after it is
        self._hurried = asyncio.Event()
        self._committer: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        # One thread: an fsync may take long, and must neither wait for other work nor run beside another fsync.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    @property
    def ok(self) -> bool:
        """Whether the next call can be taken on. Where it is False, it must be refused before it costs anything
        (see `check`), and the gateway is not ready.
        """
        return self._fault is None and self._written - self._durable <= MAX_NOT_DURABLE

    @property
    def receipts_written(self) -> int:
        """Since the ledger was opened."""
        return self._receipts

    @property
    def open_call_count(self) -> int:
        """How many have been sent to a server and have no receipt yet."""
        return self._chain.open_call_count

    @property
    def durable_end(self) -> tuple[int, int]:
        """(a segment's number, how many of its bytes): everything up to there outlives a power cut."""
        return self._durable_at

    def open_calls(self) -> list[list[OpenCall]]:
        """By call, what was opened and has no receipt: right after `open`, what a killed gateway has left behind."""
        return self._chain.open_calls()

    def recently_closed(self) -> list[tuple[OpenCall, Receipt]]:
        """The newest calls that have their receipts, right after `open`: a killed gateway may have come no further.
        They are handed over."""
        closed, self._chain.recently_closed = self._chain.recently_closed, []
        return closed

    def check(self) -> None:
        """Raise `LedgerUnavailable` where `ok` is False."""
        if self._fault is not None:
            raise LedgerUnavailable(self._fault)
        if self._written - self._durable > MAX_NOT_DURABLE:
            raise LedgerUnavailable(f"the ledger's disk is too slow: {MAX_NOT_DURABLE} rows wait for it")

    def open(self) -> None:
        """Take the folder, set a torn end aside, continue the chain. Raises `LedgerUnavailable` where it can not."""
        self._chain.open()
        self._durable_at = (self._chain.segment_number, self._chain.size)

    def open_call(self, opened: OpenCall) -> None:
        """Write that a server is about to be asked, and keep room for the receipt.

        Raises `LedgerUnavailable` where that can not be had: then the server must not be asked.
        """
        self.check()
        try:
            self._chain.open_call(opened)
        except LedgerUnavailable as error:
            self._fail(error)
        self._wrote()

    def open_attempts(self, call_id: str) -> list[OpenCall]:
        """Those of a call that no row has closed: once its receipt is written, what was done in vain."""
        return self._chain.open_attempts(call_id)

    def append(self, row: Receipt | UnbilledWork | Correction) -> None:
        """Write a row, which closes what was opened for it. It outlives this process, and a power cut once `durable`.

        Raises `LedgerUnavailable` where it could not be written: then there is no trace of it in the ledger, and all
        of it in the log.
        """
        try:
            if self._needs_restart:
                self.check()
            self._chain.append(row)
        except LedgerUnavailable as error:
            log.error("a receipt is not in the ledger: %s", msgspec.json.encode(row).decode())
            self._fail(error)
        self._receipts += type(row) is Receipt
        self._wrote()

    def _wrote(self) -> None:
        self._written += 1
        if self._committer is None:
            self._committer = asyncio.get_running_loop().create_task(self._commit(), name="ledger commit")

    async def durable(self, *, flush_now: bool = False) -> None:
        """Return when every row written until now is on disk. Raises `LedgerUnavailable` if that can not be said.

        `hurry`: without waiting for neighbours.
        """
        rows = self._written
        if self._durable < rows and not self._needs_restart:
            if flush_now:
                self._hurried.set()
            await (self._gathering if rows > self._syncing else self._committing).wait()
        if self._durable < rows:
            self.check()

    async def close(self) -> None:
        """Make everything durable and let go of the folder. Safe to call twice."""
        if self._committer is not None:
            self._hurried.set()
            await self._committer
        if self._prober is not None:
            self._prober.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._prober
        self._disk.shutdown()
        self._chain.close()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Faults

    def _fail(self, error: LedgerUnavailable) -> NoReturn:
        if not self._needs_restart:
            if self._fault is None:
                log.error("%s", error.message)
            self._fault = error.message
            self._needs_restart = self._chain.needs_reopen
        if self._prober is None and not self._needs_restart:
            self._prober = asyncio.get_running_loop().create_task(self._probe(), name="ledger probe")
        raise error

    async def _probe(self) -> None:
        """Try a write beside the ledger until one works."""
        loop = asyncio.get_running_loop()
        while self._fault is not None and not self._needs_restart:
            await asyncio.sleep(PROBE_SECONDS)
            with contextlib.suppress(OSError, LedgerUnavailable):
                await loop.run_in_executor(self._disk, _try_to_write, self.folder / "probe")
                self._chain.reserve()
                log.warning("the ledger can be written again")
                self._fault = None
        self._prober = None

    # Group commit

    async def _commit(self) -> None:
        """Fsync until everything written is on disk; then end. Rows that come in meanwhile share the next fsync."""
        loop, chain = asyncio.get_running_loop(), self._chain
        while self._durable < self._written and not self._needs_restart:
            await self._gather()
            self._syncing = rows = self._written
            self._committing, self._gathering = self._gathering, asyncio.Event()
            full, chain.full_segments = chain.full_segments, []
            end = (chain.segment_number, chain.size)
            try:
                await loop.run_in_executor(self._disk, sync, full, chain.segment, self.folder)
                self._durable, self._durable_at = rows, end
            except OSError as error:
                # The kernel may have dropped the pages and will call the next fsync a success: no second try.
                self._fault = f"the ledger's rows can not be made durable: {error.strerror}; restart the gateway"
                self._needs_restart = True
                self._gathering.set()
                log.critical("%s", self._fault)
            self._committing.set()
            chain.check_segment_age(time.time())
            if full and self._keep_days is not None:
                oldest = time.time() - self._keep_days * 86_400
                await loop.run_in_executor(
                    self._disk, partial(remove_old_segments, self.folder, oldest, self.may_remove_segment)
                )
        self._committer = None

    async def _gather(self) -> None:
        """Wait for neighbours of the row that was written, but not where somebody is in a hurry."""
        enough = asyncio.get_running_loop().call_later(GROUP_COMMIT_SECONDS, self._hurried.set)
        await self._hurried.wait()
        enough.cancel()
        self._hurried.clear()


def _try_to_write(file: Path) -> None:
    try:
        with file.open("wb") as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    finally:
        file.unlink(missing_ok=True)
