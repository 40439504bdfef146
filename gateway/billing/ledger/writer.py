"""The ledger's writer: appends rows to one replica's chain, and makes them durable by group commit.

A row is written with a single `write`: before an attempt's request is sent (`open_call`), and before the end of an
answer is sent (`append`). So a killed process has left a row for every answer that was finished or begun. A background
task fsyncs the rows that were written meanwhile, all together. When `durable` returns, the rows are on disk.

  fault                     guarantee
  the process is killed     every written row is there, whole; `open_calls` returns what lacks its receipt
  the machine loses power   every row for which `durable` has returned is there; a torn end is moved aside
  the disk is full          open calls are closed, in space allocated before; no call is opened, and `ok` is False
  a write fails             no half row precedes a good one; `ok` is False until writing works again
  an fsync fails            no row is known to be durable any more, so `ok` stays False until a restart
  the disk is slow          no call is opened, and `ok` is False, while MAX_NOT_DURABLE rows wait for their fsync
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

GROUP_COMMIT_SECONDS = 0.05  # how long rows wait to share an fsync; a power failure loses at most so much
MAX_NOT_DURABLE = 100_000  # rows: half a minute of two thousand calls a second
PROBE_SECONDS = 1.0  # between two test writes after a write has failed
PROBE_BYTES = 64 * 1024  # of a test write

_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

log = logging.getLogger(__name__)


class Ledger:
    """The ledger of one gateway, in `directory/replica`. `open` it before use, `close` it after.

    Belongs to one event loop. Segments whose rows are all older than `keep_days` are removed, the oldest first; None
    keeps everything. `may_remove_segment` decides on each segment's number. The shipper sets it, so that no segment is
    removed before it was shipped.
    """

    def __init__(
        self, directory: Path, replica: str, *, segment_bytes: int = SEGMENT_BYTES, keep_days: float | None = None
    ) -> None:
        if not _REPLICA.fullmatch(replica):
            raise ValueError(
                f"the replica name {replica!r} must be a folder name of letters, digits, dots, dashes and underscores"
            )
        self.folder = directory / replica
        self.may_remove_segment: Callable[[int], bool] = lambda segment_number: True
        self._keep_days = keep_days
        self._chain = Appender(self.folder, segment_bytes=segment_bytes)
        self._written = 0  # rows since opening
        self._receipts = 0
        self._syncing = 0  # rows covered by the fsync that has begun
        self._durable = 0  # rows on disk
        self._durable_at = (0, 0)  # the segment's number and the offset up to which all is on disk
        self._fault: str | None = None
        self._needs_restart = False
        self._sync_done = asyncio.Event()  # of the fsync that has begun
        self._next_sync_done = asyncio.Event()  # of the fsync after it
        self._flush_requested = asyncio.Event()
        self._committer: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        # One thread: an fsync may take long, and must neither wait for other work nor run beside another fsync.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    @property
    def ok(self) -> bool:
        """Whether the next call can be recorded. If not, it is rejected (`check`), and the gateway is not ready."""
        return self._fault is None and self._written - self._durable <= MAX_NOT_DURABLE

    @property
    def receipts_written(self) -> int:
        """How many receipts were written since the ledger was opened."""
        return self._receipts

    @property
    def open_call_count(self) -> int:
        """How many calls are open: sent to a deployment, and without a receipt yet."""
        return self._chain.open_call_count

    @property
    def durable_end(self) -> tuple[int, int]:
        """(segment number, offset in its file): all rows up to there survive a power failure."""
        return self._durable_at

    def open_calls(self) -> list[list[OpenCall]]:
        """The open attempts of each open call. Right after `open`, those that a dead gateway has left."""
        return self._chain.open_calls()

    def recently_closed(self) -> list[tuple[OpenCall, Receipt]]:
        """The newest calls with receipts, as found by `open`: a dead gateway may not have settled them.

        Hands them over: a second call returns nothing.
        """
        closed, self._chain.recently_closed = self._chain.recently_closed, []
        return closed

    def check(self) -> None:
        """Raise `LedgerUnavailable` if `ok` is False."""
        if self._fault is not None:
            raise LedgerUnavailable(self._fault)
        if self._written - self._durable > MAX_NOT_DURABLE:
            raise LedgerUnavailable(f"the ledger's disk is too slow: {MAX_NOT_DURABLE} rows wait for their fsync")

    def open(self) -> None:
        """Lock the folder, move a torn end aside, and continue the chain. Raises `LedgerUnavailable`."""
        self._chain.open()
        self._durable_at = (self._chain.segment_number, self._chain.size)

    def open_call(self, opened: OpenCall) -> None:
        """Write an attempt's row before its request is sent, and allocate space for the receipt.

        Raises `LedgerUnavailable`: then the request must not be sent.
        """
        self.check()
        try:
            self._chain.open_call(opened)
        except LedgerUnavailable as error:
            self._fail(error)
        self._wrote()

    def open_attempts(self, call_id: str) -> list[OpenCall]:
        """The open attempts of a call. Once its receipt is written, these are unbilled."""
        return self._chain.open_attempts(call_id)

    def append(self, row: Receipt | UnbilledWork | Correction) -> None:
        """Write a row, and close what it ends. The row survives this process, and a power failure once it is `durable`.

        Raises `LedgerUnavailable` if it cannot be written. Then nothing of it is in the ledger, but all of it in the
        log.
        """
        try:
            if self._needs_restart:
                self.check()
            self._chain.append(row)
        except LedgerUnavailable as error:
            log.error("the ledger could not record this row: %s", msgspec.json.encode(row).decode())
            self._fail(error)
        self._receipts += type(row) is Receipt
        self._wrote()

    def _wrote(self) -> None:
        self._written += 1
        if self._committer is None:
            self._committer = asyncio.get_running_loop().create_task(self._commit(), name="ledger commit")

    async def durable(self, *, flush_now: bool = False) -> None:
        """Return when every row written until now is on disk. Raises `LedgerUnavailable` if they may not be.

        `flush_now`: begin the fsync without waiting for more rows to share it.
        """
        rows = self._written
        if self._durable < rows and not self._needs_restart:
            if flush_now:
                self._flush_requested.set()
            # Rows that the running fsync does not cover wait for the one after it.
            await (self._next_sync_done if rows > self._syncing else self._sync_done).wait()
        if self._durable < rows:
            self.check()

    async def close(self) -> None:
        """Make all rows durable, close the files and release the lock. Safe to call twice."""
        if self._committer is not None:
            self._flush_requested.set()
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
        """Write a test file beside the ledger, until that works."""
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
        """Fsync until all written rows are on disk, then end. Rows written meanwhile share the next fsync."""
        loop, chain = asyncio.get_running_loop(), self._chain
        while self._durable < self._written and not self._needs_restart:
            await self._wait_for_rows()
            self._syncing = rows = self._written
            self._sync_done, self._next_sync_done = self._next_sync_done, asyncio.Event()
            full, chain.full_segments = chain.full_segments, []
            end = (chain.segment_number, chain.size)
            try:
                await loop.run_in_executor(self._disk, sync, full, chain.segment, self.folder)
                self._durable, self._durable_at = rows, end
            except OSError as error:
                # The kernel may have dropped the pages, and would report the next fsync as a success. So never retry.
                self._fault = f"the ledger's rows cannot be made durable: {error.strerror}; restart the gateway"
                self._needs_restart = True
                self._next_sync_done.set()
                log.critical("%s", self._fault)
            self._sync_done.set()
            chain.check_segment_age(time.time())
            if full and self._keep_days is not None:
                oldest = time.time() - self._keep_days * 86_400
                await loop.run_in_executor(
                    self._disk, partial(remove_old_segments, self.folder, oldest, self.may_remove_segment)
                )
        self._committer = None

    async def _wait_for_rows(self) -> None:
        """Wait for more rows to share the fsync, unless a flush is requested."""
        timer = asyncio.get_running_loop().call_later(GROUP_COMMIT_SECONDS, self._flush_requested.set)
        await self._flush_requested.wait()
        timer.cancel()
        self._flush_requested.clear()


def _try_to_write(file: Path) -> None:
    try:
        with file.open("wb") as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    finally:
        file.unlink(missing_ok=True)
