"""The ledger's writer: appends rows to one replica's chain, and makes them durable by group commit.

Each row is written with a single `write`. `open_call` writes a row before an attempt's request is sent. `append` writes
the receipt before the end of the answer is sent. If the process is killed, the ledger therefore has a row for every
answer that was begun. A background task makes all rows written since its last run durable with one fsync. When
`durable` returns, the rows are on disk.

  fault                     guarantee
  the process is killed     All written rows are complete. `open_calls` returns the calls without a receipt.
  the machine loses power   All rows for which `durable` has returned are on disk. An incomplete last row is moved
                            aside.
  the disk is full          Open calls can be closed, in space allocated in advance. No call can be opened; `ok` is
                            False.
  a write fails             An incomplete row is never followed by another row. `ok` is False until writing works again.
  an fsync fails            Later rows cannot be known to be durable. `ok` is False until a restart.
  the disk is slow          While more than MAX_NOT_DURABLE rows wait for their fsync, no call can be opened; `ok` is
                            False.
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
from gateway.billing.ledger.rows import AppendedRow, OpenCall
from gateway.core.errors import LedgerUnavailable
from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.types import Receipt

GROUP_COMMIT_SECONDS = 0.05  # how long rows wait to share an fsync; a power failure loses at most the rows of this time
MAX_NOT_DURABLE = 100_000  # rows: those of 25 seconds at two thousand calls a second
PROBE_SECONDS = 1.0  # between two test writes after a write has failed
PROBE_BYTES = 64 * 1024  # size of a test write

_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

log = logging.getLogger(__name__)


class Ledger:
    """Writer of one gateway's chain, in `directory/replica`. Call `open` before use and `close` after use.

    All methods must be called on one event loop. Segments whose rows are all older than `keep_days` are removed, the
    oldest first; with None, no segment is removed. `may_remove_segment` returns whether the segment of a number may be
    removed. The shipper sets it, so that no segment is removed before it was shipped.
    """

    def __init__(
        self,
        directory: Path,
        replica: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        keep_days: float | None = None,
        supervisor: Supervisor | None = None,
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
        self._commit_began = 0.0  # by the monotonic clock, of the rows that are not durable yet
        self._durable_at = (0, 0)  # the segment's number and the offset up to which all rows are on disk
        self._fault: str | None = None
        self._needs_restart = False
        self._sync_done = asyncio.Event()  # set when the fsync that has begun is done
        self._next_sync_done = asyncio.Event()  # set when the fsync after that one is done
        self._flush_requested = asyncio.Event()
        self._supervisor = supervisor or Supervisor()
        self._committer: SupervisedTask | None = None
        self._prober: SupervisedTask | None = None
        # One thread of its own: an fsync may take long. It must not wait for other work or overlap with another fsync.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    @property
    def ok(self) -> bool:
        """Whether the next call can be recorded. If False, `check` rejects new calls, and the gateway is not ready."""
        return self._fault is None and self._written - self._durable <= MAX_NOT_DURABLE

    @property
    def receipts_written(self) -> int:
        """The number of receipts written since the ledger was opened."""
        return self._receipts

    @property
    def lag_seconds(self) -> float:
        """How long the oldest rows that are not durable yet have waited for their fsync. 0 if all are durable."""
        return time.monotonic() - self._commit_began if self._written > self._durable else 0.0

    @property
    def open_call_count(self) -> int:
        """The number of open calls: those that have an `opened` row but no receipt yet."""
        return self._chain.open_call_count

    @property
    def durable_end(self) -> tuple[int, int]:
        """Segment number and offset in its file. All rows up to this position survive a power failure."""
        return self._durable_at

    def open_calls(self) -> list[list[OpenCall]]:
        """Return the open attempts of each open call. Right after `open`, a gateway that died has left them open."""
        return self._chain.open_calls()

    def recently_closed(self) -> list[tuple[OpenCall, Receipt]]:
        """Return the most recent calls with receipts that `open` found. They may be unsettled, if the gateway died.

        Only the first call of this method returns them. Later calls return an empty list.
        """
        closed, self._chain.recently_closed = self._chain.recently_closed, []
        return closed

    def recently_counted(self) -> list[tuple[str, int, int]]:
        """Return the most recent prompts that deployments counted: deployment, tokens by our estimate, and counted.

        Like `recently_closed`, returns them once.
        """
        counted, self._chain.recently_counted = self._chain.recently_counted, []
        return counted

    def recently_leased(self) -> list[Receipt]:
        """Return the most recent receipts of calls that were admitted from slices, in the order of the chain.

        The gateway may have died before it reported their cost. Like `recently_closed`, returns them once.
        """
        leased, self._chain.recently_leased = self._chain.recently_leased, []
        return leased

    def check(self) -> None:
        """Raise `LedgerUnavailable` if `ok` is False."""
        if self._fault is not None:
            raise LedgerUnavailable(self._fault)
        if self._written - self._durable > MAX_NOT_DURABLE:
            raise LedgerUnavailable(f"the ledger's disk is too slow: {MAX_NOT_DURABLE} rows wait for their fsync")

    def open(self) -> None:
        """Lock the folder, move an incomplete last row aside, and find the chain's end. Raises `LedgerUnavailable`."""
        self._chain.open()
        self._durable_at = (self._chain.segment_number, self._chain.size)

    def open_call(self, opened: OpenCall) -> None:
        """Write an attempt's row before its request is sent, and allocate disk space for the receipt.

        If this raises `LedgerUnavailable`, the request must not be sent.
        """
        self.check()
        try:
            self._chain.open_call(opened)
        except LedgerUnavailable as error:
            self._fail(error)
        self._wrote()

    def open_attempts(self, call_id: str) -> list[OpenCall]:
        """Return the open attempts of a call. If its receipt is written, these attempts are unbilled."""
        return self._chain.open_attempts(call_id)

    def append(self, row: AppendedRow) -> None:
        """Write a row, and close the attempts that it ends.

        The row survives if the process is killed. After `durable` it also survives a power failure. If the row cannot
        be written, raises `LedgerUnavailable` and writes the row to the log instead.
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
        if self._committer is None or self._committer.is_done():
            self._commit_began = time.monotonic()
            self._committer = self._supervisor.start("ledger commit", self._commit, essential=True)

    async def durable(self, *, flush_now: bool = False) -> None:
        """Wait until every row written so far is on disk. Raises `LedgerUnavailable` if a row may not be on disk.

        If `flush_now` is true, the fsync begins without waiting for more rows to share it.
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
            await self._committer.join()
        if self._prober is not None:
            await self._prober.cancel()
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
            self._prober = self._supervisor.start("ledger probe", self._probe)
        raise error

    async def _probe(self) -> None:
        """Try to write a test file beside the ledger, once per `PROBE_SECONDS`, until it can be written."""
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
        """Run fsync until all written rows are on disk. Rows written during an fsync share the next one."""
        loop, chain = asyncio.get_running_loop(), self._chain
        while self._durable < self._written and not self._needs_restart:
            self._commit_began = time.monotonic()
            await self._wait_for_rows()
            self._syncing = rows = self._written
            self._sync_done, self._next_sync_done = self._next_sync_done, asyncio.Event()
            full, chain.full_segments = chain.full_segments, []
            end = (chain.segment_number, chain.size)
            try:
                await loop.run_in_executor(self._disk, sync, full, chain.segment, self.folder)
                self._durable, self._durable_at = rows, end
            except Exception as error:  # noqa: BLE001 (nothing may be taken for durable, whatever failed)
                # Never retry: the kernel may have dropped the pages, and would report success for the next fsync.
                why = error.strerror if isinstance(error, OSError) else type(error).__name__
                self._fault = f"the ledger's rows cannot be made durable: {why}; restart the gateway"
                self._needs_restart = True
                self._next_sync_done.set()
                log.critical("%s", self._fault)
            self._sync_done.set()
            chain.check_segment_age(time.time())
            if full and self._keep_days is not None:
                await self._remove_old_segments(self._keep_days)
        self._committer = None

    async def _remove_old_segments(self, keep_days: float) -> None:
        oldest = time.time() - keep_days * 86_400
        remove = partial(remove_old_segments, self.folder, oldest, self.may_remove_segment)
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, remove)
        except OSError as error:
            log.warning("old segments of %s were not removed, and are tried again later: %s", self.folder, error)

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
