"""Which receipts of a killed gateway came into the ledger: looked up by whoever takes its batches over."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Collection
from pathlib import Path

from gateway.billing.ledger.chain import chains, segments

CLOCK_SLACK_SECONDS = 60.0  # between the clock of a batch and that of the files


async def events_in_ledger(ledger: Path, event_ids: Collection[str], *, since: float) -> set[str]:
    """Those that stand in a segment which was written after `since`, of any chain on this machine."""
    found: set[str] = set()
    if not event_ids:
        return found
    for chain in chains(ledger):
        for segment in segments(chain):
            if segment.stat().st_mtime < since - CLOCK_SLACK_SECONDS:
                continue
            if segment.suffix == ".parquet":
                compaction = importlib.import_module("gateway.billing.ledger.compaction")  # brings DuckDB
                found |= await asyncio.to_thread(compaction.events_in, segment, event_ids)
                continue
            rows = await asyncio.to_thread(segment.read_bytes)
            for event_id in event_ids:
                if event_id.encode() in rows:
                    found.add(event_id)
                await asyncio.sleep(0)
    return found
