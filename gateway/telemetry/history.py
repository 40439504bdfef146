"""The history of a gateway on disk: two rings of points, the last hour in steps of 10 s and the last week in steps of
10 min.

Each worker of a gateway adds its points to its own SQLite file, `<folder>/<worker>.db` (`HistoryRecorder`), so workers
need not exchange anything. `read_history` adds up the points of all files, those of former workers included. A ring has
a fixed number of rows: the row of a point is its time modulo the ring's length. So a file has at most `FINE.length` and
`COARSE.length` rows, and a week after the last point nothing of it is shown. What is not yet written, at most one step,
is lost if the process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.telemetry.call_sums import CallSums, GroupedSums

SQLITE_WAIT_SECONDS = 5.0  # for another process that reads or writes the file
FILES_MAX = 64  # that are read; as many as there may be workers

log = logging.getLogger("warmpath")


class Ring(NamedTuple):
    """A ring of `length` points, each of which covers `step_seconds`."""

    name: str
    step_seconds: int
    length: int

    @property
    def seconds(self) -> int:
        return self.step_seconds * self.length


FINE = Ring("fine", 10, 361)  # an hour, and the step that has not ended
COARSE = Ring("coarse", 600, 1009)  # a week, likewise
RINGS = (FINE, COARSE)


class Load(msgspec.Struct, omit_defaults=True):
    """What is in flight and queued at one moment; in a point, the most at any moment of its time."""

    in_flight: int = 0
    queued: dict[str, int] = {}  # by latency class
    deployments: dict[str, int] = {}  # in flight at each deployment

    def at_least(self, other: Load) -> Load:
        """The larger of both for each number."""
        return Load(
            max(self.in_flight, other.in_flight),
            _combined(self.queued, other.queued, max),
            _combined(self.deployments, other.deployments, max),
        )

    def plus(self, other: Load) -> Load:
        """The sum of the loads of two workers."""
        return Load(
            self.in_flight + other.in_flight,
            _combined(self.queued, other.queued, int.__add__),
            _combined(self.deployments, other.deployments, int.__add__),
        )


class Point(msgspec.Struct, omit_defaults=True):
    """One step of a ring. `seconds`: how much of the step the gateway was running."""

    at: int  # start of the step, in seconds since the epoch
    seconds: float = 0.0
    sums: GroupedSums = msgspec.field(default_factory=GroupedSums)
    load: Load = msgspec.field(default_factory=Load)
    storage_timeouts: int = 0

    def add(self, other: Point) -> None:
        """Add a later part of the same step, or another step that `self` is to cover, too."""
        self.seconds += other.seconds
        self.sums.add(other.sums)
        self.load = self.load.at_least(other.load)
        self.storage_timeouts += other.storage_timeouts

    def add_worker(self, other: Point) -> None:
        """Add the same step of another worker."""
        self.seconds = max(self.seconds, other.seconds)
        self.sums.add(other.sums)
        self.load = self.load.plus(other.load)
        self.storage_timeouts += other.storage_timeouts


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Point).decode


class HistoryRecorder:
    """Writes one worker's points. `load` and `storage_timeouts` are read at each step; the latter since the start."""

    def __init__(
        self,
        folder: Path,
        worker: str,
        sums: CallSums,
        *,
        load: Callable[[], Load],
        storage_timeouts: Callable[[], int],
    ) -> None:
        self._file = folder / f"{worker}.db"
        self._sums = sums
        self._load = load
        self._storage_timeouts = storage_timeouts
        self._timeouts_seen = 0
        self._began = time.time()

    async def run(self) -> None:
        """Write a point at the end of each step, and a last one when cancelled."""
        try:
            while True:
                await asyncio.sleep(FINE.step_seconds - time.time() % FINE.step_seconds)
                await asyncio.to_thread(append, self._file, self._point())
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, sqlite3.Error):  # the gateway stops, and nothing else depends on it
                append(self._file, self._point())
            raise

    def _point(self) -> Point:
        """What happened since the last point. It is lost if it cannot be written, so that nothing piles up."""
        began, self._began = self._began, time.time()
        seen, self._timeouts_seen = self._timeouts_seen, self._storage_timeouts()
        middle = (began + self._began) / 2
        return Point(
            at=int(middle - middle % FINE.step_seconds),
            seconds=max(0.0, self._began - began),  # the clock may have been set back
            sums=self._sums.take(),
            load=self._load(),
            storage_timeouts=self._timeouts_seen - seen,
        )


def append(file: Path, point: Point) -> None:
    """Add a point to both rings. A file that is no database is set aside. Raises `OSError` or `sqlite3.Error`."""
    try:
        _append(file, point)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise
        aside = file.with_suffix(".damaged")
        log.warning("%s is damaged (%s); it is now %s, and the history begins again", file, error, aside.name)
        file.replace(aside)
        _append(file, point)


def _append(file: Path, point: Point) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with closing(sqlite3.connect(file, timeout=SQLITE_WAIT_SECONDS)) as db, db:
        for ring in RINGS:
            db.execute(f"CREATE TABLE IF NOT EXISTS {ring.name} (row INTEGER PRIMARY KEY, at INTEGER, point BLOB)")
            at = point.at - point.at % ring.step_seconds
            row = at // ring.step_seconds % ring.length
            found = db.execute(f"SELECT point FROM {ring.name} WHERE row = ? AND at = ?", (row, at)).fetchone()
            stored = _readable(found[0]) if found else None
            if stored is None:
                stored = Point(at)
            stored.add(point)
            db.execute(f"INSERT OR REPLACE INTO {ring.name} VALUES (?, ?, ?)", (row, at, _encode(stored)))


def read_history(folder: Path, ring: Ring, since: float, until: float) -> list[Point]:
    """The points of all workers that begin in this time, oldest first. Files that cannot be read are omitted."""
    points: dict[int, Point] = {}
    for file in sorted(folder.glob("*.db"))[:FILES_MAX]:
        try:
            for point in _read(file, ring, since, until):
                known = points.get(point.at)
                if known is None:
                    points[point.at] = point
                else:
                    known.add_worker(point)
        except sqlite3.Error as error:
            log.warning("%s cannot be read for the history: %s", file, error)
    return [points[at] for at in sorted(points)]


def _read(file: Path, ring: Ring, since: float, until: float) -> Iterator[Point]:
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=SQLITE_WAIT_SECONDS)) as db:
        query = f"SELECT point FROM {ring.name} WHERE at >= ? AND at <= ?"
        for (content,) in db.execute(query, (since, until)):
            point = _readable(content)
            if point is not None:
                yield point


def _readable(content: bytes) -> Point | None:
    """The point; None if another version of the gateway has written it and this one cannot read it."""
    try:
        return _decode(content)
    except msgspec.MsgspecError:
        return None


def merged(points: list[Point]) -> Point:
    """The sum of all points, at the time of the first."""
    whole = Point(points[0].at if points else 0)
    for point in points:
        whole.add(point)
    return whole


def _combined(one: dict[str, int], other: dict[str, int], combine: Callable[[int, int], int]) -> dict[str, int]:
    return {name: combine(one.get(name, 0), other.get(name, 0)) for name in one | other}


__all__ = ["COARSE", "FINE", "HistoryRecorder", "Load", "Point", "Ring", "append", "merged", "read_history"]
