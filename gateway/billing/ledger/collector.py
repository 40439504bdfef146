"""From the streams that gateways ship to (`ledger.shipper`), one ledger: each chain again, byte for byte.

An entry says where its row stands in which segment, so that a row that comes twice is known by its place, and what is
collected can be verified and read as any ledger. Rows leave the stream when they are on disk here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from redis import Redis

from gateway.billing.ledger.chain import segment_name, segments
from gateway.billing.ledger.shipper import BATCH_ROWS, STREAM_PREFIX, STREAMS_KEY, SegmentOffset


class CollectionGap(Exception):
    """What is in a stream does not continue what was collected before. The message says where."""


def collect(url: str, into: Path, *, keep: bool = False) -> dict[str, int]:
    """Take what is there now; how many rows of each chain were new. `keep`: leave them in their streams.

    Raises `NotCollected`, `redis.RedisError` and `OSError`; what was taken until then stays.
    """
    taken: dict[str, int] = {}
    with Redis.from_url(url, protocol=2) as redis:
        for member in sorted(redis.smembers(STREAMS_KEY)):
            stream = member.decode() if isinstance(member, bytes) else str(member)
            chain = into / stream.removeprefix(STREAM_PREFIX)
            taken[chain.name] = 0
            _cut_off_torn_end(chain)
            while entries := _entries(redis, stream, _end_of(chain)):
                taken[chain.name] += _append(chain, entries)
                if not keep:
                    redis.xtrim(stream, minid=str(_end_of(chain)), approximate=False)
    return taken


def _entries(redis: Any, stream: str, after: SegmentOffset) -> list[tuple[SegmentOffset, bytes]]:
    found = redis.xrange(stream, min=f"({after}", count=BATCH_ROWS)
    return [(SegmentOffset(*map(int, name.decode().split("-"))), fields[b"row"]) for name, fields in found]


def _end_of(chain: Path) -> SegmentOffset:
    files = segments(chain) if chain.is_dir() else []
    return SegmentOffset(int(files[-1].stem), files[-1].stat().st_size) if files else SegmentOffset(0, 1)


def _cut_off_torn_end(chain: Path) -> None:
    """Of a collector that was killed: the row comes again."""
    for last in (segments(chain) if chain.is_dir() else [])[-1:]:
        content = last.read_bytes()
        os.truncate(last, content.rfind(b"\n") + 1)


def _append(chain: Path, entries: list[tuple[SegmentOffset, bytes]]) -> int:
    """Each behind the one before, or at the beginning of the next segment."""
    chain.mkdir(parents=True, exist_ok=True)
    end, first = _end_of(chain), not segments(chain)
    by_segment: dict[int, list[bytes]] = {}
    for place, row in entries:
        begin = SegmentOffset(place.segment, place.offset - len(row))
        if begin != end and not (begin.offset == 0 and (first or begin.segment == end.segment + 1)):
            raise CollectionGap(
                f"{chain.name}: the rows from {end} to {begin} are in no stream: copy the gateway's folder"
            )
        by_segment.setdefault(place.segment, []).append(row)
        end, first = place, False
    for number, rows in by_segment.items():
        with (chain / segment_name(number)).open("ab") as segment:
            segment.write(b"".join(rows))
            segment.flush()
            os.fsync(segment.fileno())
    return len(entries)
