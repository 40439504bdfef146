"""Ships ledger rows to Redis Streams. `gateway.billing.ledger.collector` collects them from there into one ledger.

    one stream per chain   warmpath:ledger:<replica>.<chain id>   the set warmpath:ledgers has the names of all streams
    one entry per row      its id is <segment>-<end of the row in the segment's file>; fields `event_id` and `row`

The id of an entry is the offset of its row, so the stream itself records how far the chain was shipped. Rows are sent
once they are durable. Delivery is at least once. After a restart, or if Redis has lost entries, the shipper continues
after the stream's last entry. If there is no stream, it starts with the oldest row of the ledger. The gateway never
waits for the shipper. Retention does not remove a segment before the shipper has sent it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway.billing.ledger.chain import segment_name, segments
from gateway.billing.ledger.rows import decode_head
from gateway.billing.ledger.writer import Ledger
from gateway.storage.redis_clients import redis_client

STREAMS_KEY = "warmpath:ledgers"
STREAM_PREFIX = "warmpath:ledger:"
STREAM_ROWS_MAX = 1_000_000  # if a stream has this many rows, the shipper waits for a collector
BATCH_ROWS = 500
BATCH_BYTES = 2 * 1024 * 1024
POLL_SECONDS = 1.0  # between two checks for new rows
RETRY_MAX_SECONDS = 8.0  # between two attempts while Redis is unreachable; the pauses begin at POLL_SECONDS and double
OPERATION_SECONDS = 10.0

NO_ENTRY = "0-0"  # the newest id of an empty stream

# Adds rows atomically if the stream's last entry is the expected one. Returns the id of the last entry before the call.
# The check prevents gaps. A gap could not be filled later, because Redis requires ids to increase.
_ADD = """
local last = '0-0'
if redis.call('EXISTS', KEYS[1]) == 1 then
    local info = redis.call('XINFO', 'STREAM', KEYS[1])
    for i = 1, #info, 2 do
        if info[i] == 'last-generated-id' then last = info[i + 1] end
    end
end
if last == ARGV[1] then
    for i = 2, #ARGV, 3 do
        redis.call('XADD', KEYS[1], ARGV[i], 'event_id', ARGV[i + 1], 'row', ARGV[i + 2])
    end
end
return last
"""

log = logging.getLogger(__name__)


class SegmentOffset(NamedTuple):
    """The position where a row ends: a segment's number and a byte offset in its file."""

    segment: int
    offset: int

    def __str__(self) -> str:
        return f"{self.segment}-{self.offset}"


class Shipper:
    """Ships the rows of one chain. Start `run` as a task after the ledger is opened, and stop it before it closes."""

    def __init__(self, url: str, ledger: Ledger, replica: str) -> None:
        self.rows_shipped = 0  # since the start
        self._url = url
        self._ledger = ledger
        self._replica = replica
        self._shipped_to: SegmentOffset | None = None  # the end of the last shipped row; None while unknown
        self._complete_at = time.monotonic()  # when all durable rows were last shipped, or the start
        self._last = NO_ENTRY  # the id of the stream's newest entry, as this shipper left it
        # Until the stream's end is known, no segment may be removed.
        ledger.may_remove_segment = lambda segment: self._shipped_to is not None and segment < self._shipped_to.segment

    @property
    def lag_seconds(self) -> float:
        """How long there have been durable rows that are not shipped. 0 if all are shipped."""
        if self._shipped_to is not None and self._shipped_to >= self._ledger.durable_end:
            return 0.0
        return time.monotonic() - self._complete_at

    async def run(self, *, forever: bool = True) -> None:
        """Ship rows forever, or until all durable rows are sent. Retries if Redis is unreachable; logs that once."""
        seconds, failing = POLL_SECONDS, False
        while True:
            try:
                async with redis_client(self._url, socket_timeout=OPERATION_SECONDS) as redis:
                    stream = STREAM_PREFIX + await asyncio.to_thread(stream_name, self._ledger.folder, self._replica)
                    self._shipped_to = await self._find_start(redis, stream)
                    seconds, failing = POLL_SECONDS, False
                    while True:
                        if not await self._ship(redis, stream):
                            if self._shipped_to >= self._ledger.durable_end:
                                self._complete_at = time.monotonic()
                                if not forever:
                                    return
                            await asyncio.sleep(POLL_SECONDS)
            except (RedisError, OSError) as error:
                if not failing:
                    log.warning("cannot ship ledger rows to Redis, retrying until it is reachable: %s", error)
                failing = True
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, RETRY_MAX_SECONDS)

    async def _find_start(self, redis: Redis, stream: str) -> SegmentOffset:
        """Return where to continue: after the stream's last entry, or, without a stream, at the oldest segment."""
        await redis.sadd(STREAMS_KEY, stream)
        oldest = await asyncio.to_thread(lambda: segments(self._ledger.folder)[0])
        try:
            info = await redis.xinfo_stream(stream)
        except ResponseError:  # there is no such stream
            self._last = NO_ENTRY
            return SegmentOffset(int(oldest.stem), 0)
        self._last = _text(info["last-generated-id"])
        segment, _, offset = self._last.partition("-")
        return max(SegmentOffset(int(segment), int(offset)), SegmentOffset(int(oldest.stem), 0))

    async def _ship(self, redis: Redis, stream: str) -> bool:
        """Send the next rows. Returns False if there are none, or if the stream is full."""
        assert self._shipped_to is not None
        end = SegmentOffset(*self._ledger.durable_end)
        rows = await asyncio.to_thread(rows_after, self._ledger.folder, self._shipped_to, end)
        if not rows or await redis.xlen(stream) + len(rows) > STREAM_ROWS_MAX:
            return False
        entries = [part for end, row in rows for part in (str(end), _event_id(row), row)]
        last = _text(await redis.eval(_ADD, 1, stream, self._last, *entries))
        if last != self._last:  # Redis was restarted or emptied, so the rows that it lost must be sent again
            self._shipped_to = await self._find_start(redis, stream)
            return True
        self._shipped_to = rows[-1][0]
        self._last = str(self._shipped_to)
        self.rows_shipped += len(rows)
        return True


def rows_after(chain: Path, start: SegmentOffset, end: SegmentOffset) -> list[tuple[SegmentOffset, bytes]]:
    """Return the rows between two offsets in order, each with its end offset. At most one batch; empty at `end`."""
    rows: list[tuple[SegmentOffset, bytes]] = []
    room_bytes = BATCH_BYTES
    segment, offset = start
    while segment <= end.segment and len(rows) < BATCH_ROWS and room_bytes > 0:
        for line in _lines_from(chain / segment_name(segment), offset):
            offset += len(line)
            if not line.endswith(b"\n") or SegmentOffset(segment, offset) > end:
                return rows
            rows.append((SegmentOffset(segment, offset), line))
            room_bytes -= len(line)
            if len(rows) == BATCH_ROWS or room_bytes <= 0:
                return rows
        segment, offset = segment + 1, 0
    return rows


def _lines_from(segment: Path, offset: int) -> Iterator[bytes]:
    try:
        lines = segment.open("rb")
    except FileNotFoundError:  # compacted, by hand or after Redis had received it
        compaction = importlib.import_module("gateway.billing.ledger.compaction")  # late: imports DuckDB
        try:
            for line in compaction.compacted_lines(segment.with_suffix(".parquet")):
                if offset <= 0:
                    yield line
                offset -= len(line)
        except compaction.UnreadableLedger as error:
            raise OSError(str(error)) from error
        return
    with lines:
        lines.seek(offset)
        yield from lines


def _event_id(row: bytes) -> str:
    """Return a row's event id. Empty if the row is unreadable: it is shipped nevertheless, as a part of its chain."""
    try:
        return decode_head(row).event_id
    except (msgspec.MsgspecError, RecursionError):
        return ""


def stream_name(chain: Path, replica: str) -> str:
    """Return the stream's name: the replica's name and the id of its chain. A recreated folder has a new chain id."""
    file = chain / "id"
    with contextlib.suppress(FileExistsError), file.open("x") as made:
        made.write(secrets.token_hex(8))
    return f"{replica}.{file.read_text()}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


__all__ = ["BATCH_ROWS", "STREAMS_KEY", "STREAM_PREFIX", "SegmentOffset", "Shipper", "rows_after", "stream_name"]
