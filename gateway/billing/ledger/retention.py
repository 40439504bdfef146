"""Retention: removes old ledger segments, the oldest first, so that the remaining rows still form a hash chain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from gateway.billing.ledger.chain import first_event_id, segments
from gateway.billing.ledger.segment_locks import lock_for_removal
from gateway.core.ids import event_seconds

log = logging.getLogger(__name__)


def remove_old_segments(chain: Path, oldest: float, may_remove: Callable[[int], bool]) -> list[int]:
    """Remove the segments whose rows were all written before `oldest` (seconds since the epoch). Returns their numbers.

    Stops at the first segment that is kept. Always keeps the last segment, since new rows are chained to it. Removes
    nothing while a process reads the ledger. Keeps a segment if `may_remove(segment number)` is false.
    """
    removed: list[int] = []
    with lock_for_removal(chain, wait=False) as unlocked:
        for segment, following in pairwise(segments(chain)) if unlocked else ():
            number = int(segment.stem)
            if (began := _began(following)) is None or began >= oldest or not may_remove(number):
                break
            for file in chain.glob(f"{segment.stem}.*"):  # also its Parquet file and manifest
                file.unlink()
            removed.append(number)
    if removed:
        log.info(
            "%s: removed the segments %d to %d, which are older than the retention", chain, removed[0], removed[-1]
        )
    return removed


def _began(segment: Path) -> float | None:
    """Return when the segment's first row was written, in seconds since the epoch. None if it is unreadable."""
    try:
        event_id = first_event_id(segment)
        return None if event_id is None else event_seconds(event_id)
    except ValueError:
        return None
