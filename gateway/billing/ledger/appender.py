"""Appends rows to one chain of the ledger: its lock, its newest segment and the hash of its last row. Synchronous.

`Appender.open` takes the chain's lock, moves an incomplete last row aside, and finds the open calls in the last
segment. `open_call` and `append` write one row each with a single `write`, without retries. When a segment is full or
a day old, the next row begins a new segment, whose first row is a `carried` row that repeats the open attempts.

The receipts of open calls must not fail on a full disk. `reserve` therefore allocates disk space for them in advance.
If the disk is full, new calls are rejected, but open calls can still be closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import time
from collections import deque
from pathlib import Path

import msgspec

from gateway.billing.ledger.chain import (
    GENESIS,
    RowError,
    UnknownVersion,
    check_row,
    encode_row,
    segment_name,
    segments,
)
from gateway.billing.ledger.preallocation import preallocate, release_preallocated
from gateway.billing.ledger.rows import (
    AppendedRow,
    CarriedCalls,
    OpenCall,
    Row,
    UnbilledWork,
    add_attempt,
    attempts_left_open,
    decode,
    decode_head,
)
from gateway.core.errors import LedgerUnavailable
from gateway.core.ids import event_seconds, new_event_id
from gateway.core.private_files import restrict
from gateway.types import Receipt

SEGMENT_BYTES = 32 * 1024 * 1024  # about 20,000 calls; opening a chain reads all of its last segment
SEGMENT_SECONDS = 86_400.0  # maximum age of a segment: after that, the next row begins a new one
CLOSING_BYTES = 4096  # allocated for the receipt of one call, which has about 1000 bytes, and 200 more per attempt
MAX_RECENTLY_CLOSED = 1000  # receipts that a dead gateway may have written without settling them
MAX_RECENTLY_LEASED = 20_000  # the same, for receipts of calls that were admitted from slices; reported once a second
LEASED_TAIL_BYTES = 16 * 1024 * 1024  # of the segment before the last one, if the last one has few receipts
PREALLOCATE_BYTES = 4 * 1024 * 1024  # allocated at once, so that few rows need the system call

log = logging.getLogger(__name__)


class Appender:
    """Appends rows to one chain. Call `open` before use and `close` after use. Not thread-safe.

    Every error is a `LedgerUnavailable`. After an error the file contains only complete rows, unless `needs_reopen` is
    set.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.needs_reopen = False  # the last row is incomplete; opening the chain again removes it
        self.segment = -1  # descriptor of the newest segment
        self.segment_number = 0
        self.size = 0  # of the segment
        self.full_segments: list[int] = []  # descriptors still to be fsynced and closed
        self.recently_closed: list[tuple[OpenCall, Receipt]] = []  # found in the last segment by `open`
        self.recently_counted: list[tuple[str, int, int]] = []  # deployment, and a prompt's tokens: estimated, counted
        self.recently_leased: list[Receipt] = []  # found in the last two segments by `open`, in their order
        self._segment_bytes = self._segment_end = segment_bytes  # set to 0 when the segment is a day old
        self._segment_began = math.inf  # seconds since the epoch
        self._allocated_end: float = 0.0  # the offset up to which space is allocated; inf if that is unsupported
        self._head = GENESIS
        self._lock = -1
        self._open: dict[str, list[OpenCall]] = {}  # open attempts by call id

    @property
    def open_call_count(self) -> int:
        """The number of calls that have open attempts."""
        return len(self._open)

    def open_calls(self) -> list[list[OpenCall]]:
        """Return the open attempts of each open call. Right after `open`, these are calls of the previous process."""
        return list(self._open.values())

    def open(self) -> None:
        """Lock the folder, move an incomplete last row aside, and find the chain's end. Raises `LedgerUnavailable`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            restrict(self.folder.parent, self.folder)
            self._take_lock()
            self._recover()
        except LedgerUnavailable:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise LedgerUnavailable(f"the ledger {self.folder} cannot be opened: {error}") from error

    def close(self) -> None:
        """Close the files and release the lock. Safe to call twice."""
        for file in self.full_segments:
            os.close(file)
        if self.segment >= 0:
            release_preallocated(self.segment)
            os.close(self.segment)
        if self._lock >= 0:
            os.close(self._lock)
        self.full_segments, self.segment, self._lock = [], -1, -1

    def reserve(self) -> None:
        """Allocate disk space for one more call, and for the receipts of all open calls. Raises `LedgerUnavailable`."""
        needed = self.size + (len(self._open) + 2) * CLOSING_BYTES
        if needed > self._allocated_end:
            try:
                allocated = preallocate(self.segment, self.size, needed - self.size + PREALLOCATE_BYTES)
            except OSError as error:
                raise LedgerUnavailable(f"the ledger cannot be written: {error.strerror}") from error
            self._allocated_end = needed + PREALLOCATE_BYTES if allocated else math.inf

    def open_call(self, row: OpenCall) -> None:
        """Allocate disk space for the call's receipt, and write the attempt's row. Raises `LedgerUnavailable`."""
        self.reserve()
        self._write(row)
        add_attempt(self._open.setdefault(row.call_id, []), row)

    def append(self, row: AppendedRow) -> None:
        """Write a row at the end of the chain, and close the attempts that it ends. The row survives a killed process.

        Raises `LedgerUnavailable`.
        """
        self._write(row)
        if type(row) is not Receipt and type(row) is not UnbilledWork:  # a correction closes no attempt
            return
        if not (opened := self._open.pop(row.call_id, None)):
            return
        if len(opened) > 1 or row.deployment is None:
            self._close_one(row, opened)

    def _write(self, row: Row) -> None:
        line, digest = encode_row(row, self._head)
        if self.size + len(line) > self._segment_end and self.size:
            self._start_segment(row)
            line, digest = encode_row(row, self._head)
        try:
            written = os.write(self.segment, line)
        except OSError as error:
            raise LedgerUnavailable(f"the ledger cannot be written: {error.strerror}") from error
        if written != len(line):
            self._cut_off()
            raise LedgerUnavailable("the ledger cannot be written: the disk has no space for a whole row")
        self._head = digest
        self.size += written

    def open_attempts(self, call_id: str) -> list[OpenCall]:
        """Return the open attempts of one call."""
        return self._open.get(call_id, [])

    def _close_one(self, row: Receipt | UnbilledWork, opened: list[OpenCall]) -> None:
        by, attempt = ("unbilled", row.attempt) if isinstance(row, UnbilledWork) else ("receipt", 0)
        if left := attempts_left_open(opened, by=by, attempt=attempt, deployment=row.deployment):
            self._open[row.call_id] = left

    def check_segment_age(self, now: float) -> None:
        """Let the next row begin a new segment if the present one is a day old. Call this after each commit.

        In a new chain, the first call also sets the time at which the first segment began.
        """
        if self._segment_began == math.inf:
            self._segment_began = now
        if now >= self._segment_began + SEGMENT_SECONDS:
            self._segment_end = 0

    def _cut_off(self) -> None:
        try:
            os.ftruncate(self.segment, self.size)
            self._allocated_end = min(self._allocated_end, self.size)  # truncating also frees the allocated space
        except OSError:
            self.needs_reopen = True

    # Segments

    def _start_segment(self, row: Row) -> None:
        """Begin the next segment. If that fails, receipts are still written, in the old segment's allocated space."""
        try:
            self._begin_segment()
        except OSError as error:
            if type(row) is OpenCall or self.size + CLOSING_BYTES > self._allocated_end:
                path = self.folder / segment_name(self.segment_number + 1)
                raise LedgerUnavailable(f"the ledger cannot begin the segment {path}: {error.strerror}") from error

    def _begin_segment(self) -> None:
        path = self.folder / segment_name(self.segment_number + 1)
        segment = _open_to_append(path, os.O_EXCL)
        carried, head = b"", self._head
        if self._open:
            opened = tuple(each for call in self._open.values() for each in call)
            carried, head = encode_row(CarriedCalls(event_id=new_event_id(), opened=opened), self._head)
        try:
            needed = len(carried) + (len(self._open) + 2) * CLOSING_BYTES
            allocated = preallocate(segment, 0, needed)
            if os.write(segment, carried) != len(carried):
                raise OSError(0, "the disk has no space for a whole row")
        except OSError:
            os.close(segment)
            path.unlink()
            raise
        release_preallocated(self.segment)
        self.full_segments.append(self.segment)
        self.segment, self.size, self._head = segment, len(carried), head
        self.segment_number += 1
        self._segment_end, self._segment_began = self._segment_bytes, time.time()
        self._allocated_end = needed if allocated else math.inf

    # Opening

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 20, 0).decode()
            os.close(self._lock)
            self._lock = -1
            raise LedgerUnavailable(
                f"the ledger {self.folder} is being written by process {owner}; "
                "give every gateway its own replica name (WARMPATH_REPLICA)"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _recover(self) -> None:
        files = segments(self.folder) or [self.folder / segment_name(1)]
        self.segment_number = int(files[-1].stem)
        self.segment = _open_to_append(files[-1])
        self.size, head = _last_good_row(files[-1])
        if os.fstat(self.segment).st_size > self.size:
            _move_torn_end(files[-1], self.segment, self.size)
        release_preallocated(self.segment)  # allocated by the previous process
        last = files[-1]
        if head is None:  # the segment has no row yet
            last, head = next(
                ((f, head) for f in reversed(files[:-1]) if (head := _last_good_row(f)[1])), (last, GENESIS)
            )
        self._head = head
        found = _read_open_calls(last)
        self._segment_began, self._open, leased = found.began, found.open_calls, [*found.leased]
        self.recently_closed, self.recently_counted = [*found.closed], [*found.counted]
        if len(leased) < MAX_RECENTLY_LEASED and (earlier := files[: files.index(last)] if last in files else []):
            leased = [*_leased_receipts(earlier[-1]), *leased]
        self.recently_leased = leased[-MAX_RECENTLY_LEASED:]
        sync([], self.segment, self.folder)
        sync_folder(self.folder)


class _Found:
    """What a segment says about the calls before the start: its open calls, and its most recent receipts."""

    def __init__(self) -> None:
        self.began = math.inf  # time of the first row, in seconds since the epoch
        self.open_calls: dict[str, list[OpenCall]] = {}
        self.closed = deque[tuple[OpenCall, Receipt]](maxlen=MAX_RECENTLY_CLOSED)  # reserved in the storage
        self.leased = deque[Receipt](maxlen=MAX_RECENTLY_LEASED)  # of calls from slices
        self.counted = deque[tuple[str, int, int]](maxlen=MAX_RECENTLY_CLOSED)  # see `Appender.recently_counted`

    def add(self, opened: OpenCall | None, receipt: Receipt) -> None:
        """Note a receipt, and the row that opened its call, if the segment has it."""
        if receipt.leased:
            self.leased.append(receipt)
        elif opened is not None:
            self.closed.append((opened, receipt))
        if opened is None or not receipt.exact or not opened.expected_prompt_tokens:
            return
        if receipt.deployment == opened.deployment:
            counted = receipt.input_uncached + receipt.cache_read + receipt.cache_write
            if counted:
                self.counted.append((opened.deployment, opened.prompt_tokens_estimate, counted))


def _read_open_calls(segment: Path) -> _Found:
    found = _Found()
    if not segment.exists():
        return found
    open_calls = found.open_calls
    with segment.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                head = decode_head(line)
                if found.began == math.inf:
                    found.began = event_seconds(head.event_id)
                if head.kind in ("opened", "carried"):
                    row = decode(line)
                    for opened in row.opened if isinstance(row, CarriedCalls) else (row,):
                        assert isinstance(opened, OpenCall)
                        add_attempt(open_calls.setdefault(opened.call_id, []), opened)
                elif head.kind in ("receipt", "unbilled"):
                    before = open_calls.pop(head.call_id or "", None)
                    if before is not None:
                        left = attempts_left_open(
                            before, by=head.kind, attempt=head.attempt, deployment=head.deployment
                        )
                        open_calls.update({before[0].call_id: left} if left else {})
                    if head.kind == "receipt" and isinstance(row := decode(line), Receipt):
                        found.add(before[-1] if before is not None else None, row)
            except (msgspec.MsgspecError, ValueError) as error:
                log.error("unreadable ledger row set aside: %s:%d: %s", segment, number, error)
    return found


def _leased_receipts(segment: Path) -> list[Receipt]:
    """Return the receipts of calls from slices at the end of a segment. Skips rows that cannot be read."""
    found: list[Receipt] = []
    with segment.open("rb") as lines:
        start = max(0, segment.stat().st_size - LEASED_TAIL_BYTES)
        lines.seek(start)
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # the first line may be incomplete
                if decode_head(line).kind == "receipt" and isinstance(row := decode(line), Receipt) and row.leased:
                    found.append(row)
    return found


def _last_good_row(file: Path) -> tuple[int, str | None]:
    """Return the offset where the last valid row of a file ends, and the row's hash. (0, None) if there is none."""
    content = file.read_bytes() if file.exists() else b""
    end = content.rfind(b"\n") + 1
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        try:
            return end, check_row(content[start:end])[1]
        except UnknownVersion as error:
            raise LedgerUnavailable(f"the ledger cannot be continued: {file}: {error}") from error
        except RowError:
            end = start
    return 0, None


def _move_torn_end(file: Path, segment: int, good_end: int) -> None:
    """Move the bytes after the last valid row to `<file>.torn`. They are durable there before they are removed here."""
    with file.open("rb") as source, file.with_name(file.name + ".torn").open("ab") as torn:
        source.seek(good_end)
        torn_bytes = torn.write(source.read())
        torn.flush()
        os.fsync(torn.fileno())
    os.ftruncate(segment, good_end)
    log.warning("%s ended with an incomplete row of %d bytes, which was moved to %s", file, torn_bytes, torn.name)


def _open_to_append(file: Path, flags: int = 0) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags, 0o600)


def sync(full: list[int], segment: int, folder: Path) -> None:
    """Make all written rows durable with fsync. Closes the descriptors of `full` segments."""
    for file in full:
        os.fsync(file)
        os.close(file)
    os.fsync(segment)
    if full:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names of new files in a folder durable with fsync."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
