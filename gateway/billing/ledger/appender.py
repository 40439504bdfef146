"""The writing end of one chain: its lock, its last segment, its head. Nothing here waits, retries, or knows of tasks.

What must not fail is paid for before: `reserve` takes room on the disk for the receipts of all that is open, so that a
disk that is full refuses what is new, and not the end of what was begun.
"""

from __future__ import annotations

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
    CarriedCalls,
    Correction,
    OpenCall,
    Row,
    UnbilledWork,
    attempts_left_open,
    decode,
    decode_head,
)
from gateway.core.errors import LedgerUnavailable
from gateway.core.ids import event_seconds, new_event_id
from gateway.types import Receipt

SEGMENT_BYTES = 32 * 1024 * 1024  # about 20,000 calls; the last segment is read whole when the chain is opened
SEGMENT_SECONDS = 86_400.0  # the first row after so long begins the next segment
CLOSING_BYTES = 4096  # room for what ends one call: a receipt has some 1000 bytes, and 200 more for each attempt
MAX_RECENTLY_CLOSED = 1000  # of the newest receipts: so many may a killed gateway not have told the limits of
AHEAD_BYTES = 4 * 1024 * 1024  # of room taken at once: a system call now and then, not for each row

log = logging.getLogger(__name__)


class Appender:
    """Opened before use, closed after. Every error is a `LedgerUnavailable`, and leaves whole rows behind."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.needs_reopen = False  # half a row stands at the end; opening the chain again cuts it off
        self.segment = -1  # the file that is written to
        self.segment_number = 0
        self.size = 0  # of the segment
        self.full_segments: list[int] = []  # still to be fsynced and closed
        self.recently_closed: list[tuple[OpenCall, Receipt]] = []  # before it was opened, in its last segment
        self._segment_bytes = self._segment_end = segment_bytes  # the end is here where its age says so
        self._began = math.inf  # when the segment did
        self._room_end: float = 0  # how far into the segment room is taken
        self._head = GENESIS
        self._lock = -1
        self._open: dict[str, list[OpenCall]] = {}  # by call

    @property
    def open_call_count(self) -> int:
        return len(self._open)

    def open_calls(self) -> list[list[OpenCall]]:
        """What was opened and has no receipt, by call: after opening, what a gateway that was killed has left."""
        return list(self._open.values())

    def open(self) -> None:
        """Take the folder, set a torn end aside, continue the chain."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._recover()
        except LedgerUnavailable:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise LedgerUnavailable(f"the ledger {self.folder} can not be opened: {error}") from error

    def close(self) -> None:
        """Let go of the folder. Safe to call twice."""
        for file in self.full_segments:
            os.close(file)
        if self.segment >= 0:
            release_preallocated(self.segment)
            os.close(self.segment)
        if self._lock >= 0:
            os.close(self._lock)
        self.full_segments, self.segment, self._lock = [], -1, -1

    def reserve(self) -> None:
        """Take room for one call more: its opening, and the end of everything that is open."""
        needed = self.size + (len(self._open) + 2) * CLOSING_BYTES
        if needed > self._room_end:
            try:
                taken = preallocate(self.segment, self.size, needed - self.size + AHEAD_BYTES)
            except OSError as error:
                raise LedgerUnavailable(f"the ledger can not be written: {error.strerror}") from error
            self._room_end = needed + AHEAD_BYTES if taken else math.inf

    def open_call(self, row: OpenCall) -> None:
        """Reserve, and write the row; then as `append`."""
        self.reserve()
        self._write(row)
        self._open.setdefault(row.call_id, []).append(row)

    def append(self, row: Receipt | UnbilledWork | Correction) -> None:
        """Write the row at the end of the chain, which closes what it ends. It outlives this process from here on."""
        self._write(row)
        if type(row) is not Correction and (opened := self._open.pop(row.call_id, None)) and len(opened) > 1:
            self._close_one(row, opened)

    def _write(self, row: Row) -> None:
        line, digest = encode_row(row, self._head)
        if self.size + len(line) > self._segment_end and self.size:
            self._start_segment(row)
            line, digest = encode_row(row, self._head)
        try:
            written = os.write(self.segment, line)
        except OSError as error:
            raise LedgerUnavailable(f"the ledger can not be written: {error.strerror}") from error
        if written != len(line):
            self._cut_off()
            raise LedgerUnavailable("the ledger can not be written: no room for a whole row")
        self._head = digest
        self.size += written

    def open_attempts(self, call_id: str) -> list[OpenCall]:
        return self._open.get(call_id, [])

    def _close_one(self, row: Receipt | UnbilledWork, opened: list[OpenCall]) -> None:
        by, attempt = ("unbilled", row.attempt) if isinstance(row, UnbilledWork) else ("receipt", 0)
        if left := attempts_left_open(opened, by=by, attempt=attempt, deployment=row.deployment):
            self._open[row.call_id] = left

    def check_segment_age(self, now: float) -> None:
        """To be called behind each commit: the first one finds when the first row was written."""
        if self._began == math.inf:
            self._began = now
        if now >= self._began + SEGMENT_SECONDS:
            self._segment_end = 0

    def _cut_off(self) -> None:
        try:
            os.ftruncate(self.segment, self.size)
            self._room_end = min(self._room_end, self.size)  # which went with it
        except OSError:
            self.needs_reopen = True

    # Segments

    def _start_segment(self, row: Row) -> None:
        """The next one, with room for all that is open. Without it, what ends a call stays in this one's room."""
        try:
            self._begin_segment()
        except OSError as error:
            if type(row) is OpenCall or self.size + CLOSING_BYTES > self._room_end:
                path = self.folder / segment_name(self.segment_number + 1)
                raise LedgerUnavailable(f"the ledger can not start the segment {path}: {error.strerror}") from error

    def _begin_segment(self) -> None:
        path = self.folder / segment_name(self.segment_number + 1)
        segment = _open_to_append(path, os.O_EXCL)
        carried, head = b"", self._head
        if self._open:
            opened = tuple(each for call in self._open.values() for each in call)
            carried, head = encode_row(CarriedCalls(event_id=new_event_id(), opened=opened), self._head)
        try:
            room = len(carried) + (len(self._open) + 2) * CLOSING_BYTES
            taken = preallocate(segment, 0, room)
            if os.write(segment, carried) != len(carried):
                raise OSError(0, "no room for a whole row")
        except OSError:
            os.close(segment)
            path.unlink()
            raise
        release_preallocated(self.segment)
        self.full_segments.append(self.segment)
        self.segment, self.size, self._head = segment, len(carried), head
        self.segment_number += 1
        self._segment_end, self._began = self._segment_bytes, time.time()
        self._room_end = room if taken else math.inf

    # Opening

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 20, 0).decode()
            os.close(self._lock)
            self._lock = -1
            raise LedgerUnavailable(
                f"the ledger {self.folder} is being written by process {owner}; "
                "give every gateway a replica name of its own (WARMPATH_REPLICA)"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _recover(self) -> None:
        files = segments(self.folder) or [self.folder / segment_name(1)]
        self.segment_number = int(files[-1].stem)
        self.segment = _open_to_append(files[-1])
        self.size, head = _good_end(files[-1])
        if os.fstat(self.segment).st_size > self.size:
            _set_aside(files[-1], self.segment, self.size)
        release_preallocated(self.segment)  # of the life before
        last = files[-1]
        if head is None:  # it had just begun a new segment
            last, head = next(((f, head) for f in reversed(files[:-1]) if (head := _good_end(f)[1])), (last, GENESIS))
        self._head = head
        self._began, self._open, self.recently_closed = _left_behind(last)
        sync([], self.segment, self.folder)
        sync_folder(self.folder)


def _left_behind(segment: Path) -> tuple[float, dict[str, list[OpenCall]], list[tuple[OpenCall, Receipt]]]:
    """(when the segment's first row was made, what was opened in it or carried into it and has no receipt, and the
    newest of those that have one)."""
    began, still_open = math.inf, dict[str, list[OpenCall]]()
    closed = deque[tuple[OpenCall, Receipt]](maxlen=MAX_RECENTLY_CLOSED)
    if not segment.exists():
        return began, still_open, []
    with segment.open("rb") as lines:
        for line in lines:
            try:
                head = decode_head(line)
                if began == math.inf:
                    began = event_seconds(head.event_id)
                if head.kind in ("opened", "carried"):
                    row = decode(line)
                    for opened in row.opened if isinstance(row, CarriedCalls) else (row,):
                        assert isinstance(opened, OpenCall)
                        still_open.setdefault(opened.call_id, []).append(opened)
                elif head.kind in ("receipt", "unbilled") and head.call_id in still_open:
                    before = still_open.pop(head.call_id)
                    left = attempts_left_open(before, by=head.kind, attempt=head.attempt, deployment=head.deployment)
                    still_open.update({head.call_id: left} if left else {})
                    if isinstance(row := decode(line), Receipt):
                        closed.append((before[-1], row))
            except (msgspec.MsgspecError, ValueError) as error:
                log.error("%s: a row that can not be read (`warmpath usage verify` names it): %s", segment, error)
    return began, still_open, list(closed)


def _good_end(file: Path) -> tuple[int, str | None]:
    """(where the last row that is as it was written ends, its hash); (0, None) if there is none."""
    content = file.read_bytes() if file.exists() else b""
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


def sync(full: list[int], segment: int, folder: Path) -> None:
    """Make everything that was written durable; `full` segments are closed behind it."""
    for file in full:
        os.fsync(file)
        os.close(file)
    os.fsync(segment)
    if full:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Makes the names of new files durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
