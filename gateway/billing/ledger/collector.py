"""Collects the ledger rows that gateways have shipped to Redis into one ledger on disk, as exact copies of the chains.

The id of a stream entry is the offset of its row in its segment (`gateway.billing.ledger.shipper`). The collector
therefore detects duplicates and gaps, and the collected ledger can be verified and read like any other. It removes rows
from the stream once they are on its disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gateway.billing.ledger.chain import segment_name, segments
from gateway.billing.ledger.shipper import BATCH_ROWS, STREAM_PREFIX, STREAMS_KEY, SegmentOffset
from gateway.storage.redis_clients import blocking_redis_client


class CollectionGap(Exception):
    """The stream lacks rows that follow the collected ones. The message says which."""


def collect(url: str, into: Path, *, keep: bool = False) -> dict[str, int]:
    """Collect all rows that are in the streams now. Returns how many new rows each chain got.

    If `keep` is true, the rows are not removed from their streams. Two processes must not collect into one folder at
    the same time. Raises `CollectionGap`, `redis.RedisError` and `OSError`. Rows collected before the error are kept.
    """
    collected: dict[str, int] = {}
    with blocking_redis_client(url) as redis:
        for member in sorted(redis.smembers(STREAMS_KEY)):
            stream = member.decode() if isinstance(member, bytes) else str(member)
            chain = into / stream.removeprefix(STREAM_PREFIX)
            collected[chain.name] = 0
            _cut_off_torn_end(chain)
            while entries := _entries(redis, stream, _end_of(chain)):
                collected[chain.name] += _append(chain, entries)
                if not keep:
                    redis.xtrim(stream, minid=str(_end_of(chain)), approximate=False)
    return collected


def _entries(redis: Any, stream: str, after: SegmentOffset) -> list[tuple[SegmentOffset, bytes]]:
    found = redis.xrange(stream, min=f"({after}", count=BATCH_ROWS)
    return [(SegmentOffset(*map(int, name.decode().split("-"))), fields[b"row"]) for name, fields in found]


def _end_of(chain: Path) -> SegmentOffset:
    files = segments(chain) if chain.is_dir() else []
    return SegmentOffset(int(files[-1].stem), files[-1].stat().st_size) if files else SegmentOffset(0, 1)


def _cut_off_torn_end(chain: Path) -> None:
    """Remove an incomplete last row that a killed collector has left. The row is still in the stream."""
    for last in (segments(chain) if chain.is_dir() else [])[-1:]:
        content = last.read_bytes()
        os.truncate(last, content.rfind(b"\n") + 1)


def _append(chain: Path, entries: list[tuple[SegmentOffset, bytes]]) -> int:
    """Append rows. Each row must follow the one before it directly, or begin the next segment."""
    chain.mkdir(parents=True, exist_ok=True)
    end, first = _end_of(chain), not segments(chain)
    by_segment: dict[int, list[bytes]] = {}
    for row_end, row in entries:
        begin = SegmentOffset(row_end.segment, row_end.offset - len(row))
        # A new chain may begin with any segment, since retention may have removed the oldest ones.
        if begin != end and not (begin.offset == 0 and (first or begin.segment == end.segment + 1)):
            raise CollectionGap(
                f"{chain.name}: the stream lacks the rows from {end} to {begin}; copy the gateway's folder instead"
            )
        by_segment.setdefault(row_end.segment, []).append(row)
        end, first = row_end, False
    for number, rows in by_segment.items():
        with (chain / segment_name(number)).open("ab") as segment:
            segment.write(b"".join(rows))
            segment.flush()
            os.fsync(segment.fileno())
    return len(entries)
