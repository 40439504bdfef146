"""Searches the ledger for receipts. Used by a gateway that takes over the batches of a killed gateway."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Collection
from pathlib import Path

from gateway.billing.ledger.chain import chains, segments

CLOCK_SLACK_SECONDS = 60.0  # tolerated difference between the clocks of the batch and of the file system


async def events_in_ledger(ledger: Path, event_ids: Collection[str], *, since: float) -> set[str]:
    """Return which of the event ids are in the ledger segments of this machine, in any chain.

    `since` is in seconds since the epoch. Segments that were last modified before `since` are skipped.
    """
    found: set[str] = set()
    if not event_ids:
        return found
    for chain in chains(ledger):
        for segment in segments(chain):
            if segment.stat().st_mtime < since - CLOCK_SLACK_SECONDS:
                continue
            if segment.suffix == ".parquet":
                compaction = importlib.import_module("gateway.billing.ledger.compaction")  # late: loads DuckDB
                found |= await asyncio.to_thread(compaction.find_event_ids, segment, event_ids)
                continue
            rows = await asyncio.to_thread(segment.read_bytes)
            for event_id in event_ids:
                if event_id.encode() in rows:
                    found.add(event_id)
                await asyncio.sleep(0)  # a search through a large segment must not block the event loop
    return found
