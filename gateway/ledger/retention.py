"""How long rows are kept. Whole segments go, the oldest first: what is left is a chain from its first row on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from gateway.ids import event_seconds
from gateway.ledger.chain import segments
from gateway.ledger.rows import decode_head

log = logging.getLogger(__name__)


def drop_old_segments(chain: Path, oldest: float, may_remove: Callable[[int], bool]) -> list[int]:
    """Remove the segments in which every row was written before `oldest` (seconds since the epoch); their numbers.

    It ends at the first that is to be kept. The last segment stays in any case: the chain continues from it.
    """
    removed: list[int] = []
    for segment, following in pairwise(segments(chain)):
        number = int(segment.stem)
        if (began := _began(following)) is None or began >= oldest or not may_remove(number):
            break
        for file in chain.glob(f"{segment.stem}.*"):  # and what was made of it
            file.unlink()
        removed.append(number)
    if removed:
        log.info("%s: segments %d to %d are older than they are kept", chain, removed[0], removed[-1])
    return removed


def _began(segment: Path) -> float | None:
    """When its first row was made; None while it has none, or one that can not be read."""
    begins = segment if segment.suffix == ".jsonl" else segment.with_suffix(".manifest")
    with begins.open("rb") as lines:
        first = lines.readline()
    try:
        return event_seconds(decode_head(first).event_id)
    except (msgspec.MsgspecError, ValueError):
        return None
