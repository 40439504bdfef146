"""The way of rows into Redis Streams, from where they are collected into one ledger (`ledger.collector`).

    one stream for each chain   warmpath:ledger:<replica>.<chain id>   all of them are members of warmpath:ledgers
    one entry for each row      its id is <segment>-<end of the row in the segment's file>; fields `event_id` and `row`

An entry's id is the row's place, so that Redis itself remembers how far it got. Rows are sent when they are durable,
at least once: after a restart, and whenever Redis has forgotten some, from where the stream ends; where there is no
stream, from the oldest row that is kept. The gateway never waits for any of this, and a segment is not removed for its
age before it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway.billing.ledger.chain import segment_name, segments
from gateway.billing.ledger.rows import decode_head
from gateway.billing.ledger.writer import Ledger

STREAMS_KEY = "warmpath:ledgers"
STREAM_PREFIX = "warmpath:ledger:"
STREAM_ROWS_MAX = 1_000_000  # then it waits for a collector
BATCH_ROWS = 500
BATCH_BYTES = 2 * 1024 * 1024
LOOK_SECONDS = 1.0  # how often it looks for new rows
AGAIN_MAX_SECONDS = 8.0  # between two tries of a Redis that is away: from LOOK_SECONDS on, doubling
OPERATION_SECONDS = 10.0

NO_ENTRY = "0-0"  # the newest id of a stream without any

# Adds the rows if the stream ends where we left it, in one step; gives back where it ended. Behind a gap no entry could
# be added any more: Redis wants rising ids.
_ADD = """
local last = '0-0'
if redis.call('EXISTS', KEYS[1]) == 1 then
    local told = redis.call('XINFO', 'STREAM', KEYS[1])
    for i = 1, #told, 2 do
        if told[i] == 'last-generated-id' then last = told[i + 1] end
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
    """The end of a row."""

    segment: int
    offset: int

    def __str__(self) -> str:
        return f"{self.segment}-{self.offset}"


class Shipper:
    """Sends one ledger's rows. `run` it from the ledger's opening to its closing."""

    def __init__(self, url: str, ledger: Ledger, replica: str) -> None:
        self.rows_shipped = 0  # since the start
        self._url = url
        self._ledger = ledger
        self._replica = replica
        self._place: SegmentOffset | None = None  # up to where rows are in the stream, once that is known
        self._last = NO_ENTRY  # the id of the stream's newest entry, as we left it
        ledger.may_remove_segment = lambda segment: self._place is not None and segment < self._place.segment

    async def run(self, *, for_ever: bool = True) -> None:
        """For ever, or until all that is durable was sent. A Redis that is away is asked again and again, and said
        once.
        """
        seconds, away = LOOK_SECONDS, False
        while True:
            try:
                async with Redis.from_url(self._url, socket_timeout=OPERATION_SECONDS, protocol=2) as redis:
                    stream = STREAM_PREFIX + await asyncio.to_thread(stream_name, self._ledger.folder, self._replica)
                    self._place = await self._begin(redis, stream)
                    seconds, away = LOOK_SECONDS, False
                    while True:
                        if not await self._ship(redis, stream):
                            if not for_ever and self._place >= self._ledger.durable_end:
                                return
                            await asyncio.sleep(LOOK_SECONDS)
            except (RedisError, OSError) as error:
                if not away:
                    log.warning("rows of the ledger can not be shipped; they wait: %s", error)
                away = True
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, AGAIN_MAX_SECONDS)

    async def _begin(self, redis: Redis, stream: str) -> SegmentOffset:
        await redis.sadd(STREAMS_KEY, stream)
        oldest = await asyncio.to_thread(lambda: segments(self._ledger.folder)[0])
        try:
            told = await redis.xinfo_stream(stream)
        except ResponseError:  # there is none
            self._last = NO_ENTRY
            return SegmentOffset(int(oldest.stem), 0)
        self._last = _text(told["last-generated-id"])
        segment, _, offset = self._last.partition("-")
        return max(SegmentOffset(int(segment), int(offset)), SegmentOffset(int(oldest.stem), 0))

    async def _ship(self, redis: Redis, stream: str) -> bool:
        """Send the next rows; False where there are none, or where the stream is full."""
        assert self._place is not None
        end = SegmentOffset(*self._ledger.durable_end)
        rows = await asyncio.to_thread(rows_after, self._ledger.folder, self._place, end)
        if not rows or await redis.xlen(stream) + len(rows) > STREAM_ROWS_MAX:
            return False
        entries = [part for place, row in rows for part in (str(place), decode_head(row).event_id, row)]
        last = _text(await redis.eval(_ADD, 1, stream, self._last, *entries))
        if last != self._last:  # Redis was restarted or emptied beside us, and what it lost is to be sent again
            self._place = await self._begin(redis, stream)
            return True
        self._place = rows[-1][0]
        self._last = str(self._place)
        self.rows_shipped += len(rows)
        return True


def rows_after(chain: Path, place: SegmentOffset, end: SegmentOffset) -> list[tuple[SegmentOffset, bytes]]:
    """The rows behind a place, as far as they are durable: some of them, the first ones first. [] at the end."""
    rows: list[tuple[SegmentOffset, bytes]] = []
    room_bytes = BATCH_BYTES
    segment, offset = place
    while segment <= end.segment and len(rows) < BATCH_ROWS and room_bytes > 0:
        for line in _lines_behind(chain / segment_name(segment), offset):
            offset += len(line)
            if not line.endswith(b"\n") or SegmentOffset(segment, offset) > end:
                return rows
            rows.append((SegmentOffset(segment, offset), line))
            room_bytes -= len(line)
            if len(rows) == BATCH_ROWS or room_bytes <= 0:
                return rows
        segment, offset = segment + 1, 0
    return rows


def _lines_behind(segment: Path, offset: int) -> Iterator[bytes]:
    try:
        lines = segment.open("rb")
    except FileNotFoundError:  # it was compacted: by hand, or it was sent and Redis has forgotten it
        compaction = importlib.import_module("gateway.billing.ledger.compaction")  # brings DuckDB
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


def stream_name(chain: Path, replica: str) -> str:
    """The replica's name and an id of its chain: a folder that was lost and begun again is another chain."""
    file = chain / "id"
    with contextlib.suppress(FileExistsError), file.open("x") as made:
        made.write(secrets.token_hex(8))
    return f"{replica}.{file.read_text()}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


__all__ = ["BATCH_ROWS", "STREAMS_KEY", "STREAM_PREFIX", "SegmentOffset", "Shipper", "rows_after", "stream_name"]
