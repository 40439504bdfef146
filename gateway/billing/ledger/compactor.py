"""Compacts the full segments of a gateway's own chain in the background, so that sums over a large ledger stay fast.

Segments are compacted one at a time, each in a separate process with the lowest priority
(`gateway.billing.ledger.compaction`). The process needs one CPU second per twenty thousand calls. It imports DuckDB, so
the gateway does not have to. A segment is compacted only after its rows were shipped, if they are to be shipped. An
interrupted compaction is repeated after the next start.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from gateway.billing.ledger.chain import compactable_segments
from gateway.billing.ledger.writer import Ledger

POLL_SECONDS = 15.0  # between two searches for full segments
SEGMENT_SECONDS_MAX = 600.0  # for one segment; after that it is not compacted until the next start

log = logging.getLogger(__name__)


class Compactor:
    """Compacts the segments of one chain. Start `run` as a task after the ledger opens; stop it before it closes."""

    def __init__(self, ledger: Ledger) -> None:
        self.segments_compacted = 0  # since the start
        self._ledger = ledger
        self._failed: set[Path] = set()  # not tried again before the next start

    async def run(self) -> None:
        """Compact full segments as they appear, forever."""
        while True:
            await self.catch_up()
            await asyncio.sleep(POLL_SECONDS)

    async def catch_up(self) -> None:
        """Compact all full segments, except those whose rows must still be shipped."""
        durable_segment, _ = self._ledger.durable_end
        for file in await asyncio.to_thread(compactable_segments, self._ledger.folder):
            number = int(file.stem)
            if number < durable_segment and self._ledger.may_remove_segment(number) and file not in self._failed:
                await self._compact(file)

    async def _compact(self, file: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.billing.ledger.compaction", str(file), stderr=asyncio.subprocess.PIPE
        )
        output = b""
        try:
            async with asyncio.timeout(SEGMENT_SECONDS_MAX):
                _, output = await process.communicate()
        except TimeoutError:
            output = f"it took more than {SEGMENT_SECONDS_MAX:.0f} s".encode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            self.segments_compacted += 1
        else:
            self._failed.add(file)
            lines = output.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
            log.error("cannot compact %s, which stays uncompacted until the next start: %s", file, lines[-1])
