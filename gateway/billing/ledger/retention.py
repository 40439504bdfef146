"""How long rows are kept. Whole segments go, the oldest first: what is left is a chain from its first row on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from gateway.billing.ledger.chain import first_event_id, segments
from gateway.billing.ledger.segment_locks import removing
from gateway.core.ids import event_seconds

log = logging.getLogger(__name__)


def remove_old_segments(chain: Path, oldest: float, may_remove_segment: Callable[[int], bool]) -> list[int]:
    """Remove the segments in which every row was written before `oldest` (seconds since the epoch); their numbers.

    It ends at the first that is to be kept. The last segment stays in any case: the chain continues from it. While
    somebody reads the ledger all stay, until the next time.
    """
    removed: list[int] = []
    with removing(chain, wait=False) as free:
        for segment, following in pairwise(segments(chain)) if free else ():
            number = int(segment.stem)
            if (began := _began(following)) is None or began >= oldest or not may_remove_segment(number):
                break
            for file in chain.glob(f"{segment.stem}.*"):  # and what was made of it
                file.unlink()
            removed.append(number)
    if removed:
        log.info("%s: segments %d to %d are older than they are kept", chain, removed[0], removed[-1])
    return removed


def _began(segment: Path) -> float | None:
    """When its first row was made; None while it has none, or one that can not be read."""
    try:
        event_id = first_event_id(segment)
        return None if event_id is None else event_seconds(event_id)
    except ValueError:
        return None
