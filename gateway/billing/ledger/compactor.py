"""Closed segments of a gateway's own chain become Parquet beside its work, so that any sum over a large ledger is quick
without anybody having thought of it.

Each is compacted by a process of its own that gives way to everything else, one at a time: `ledger.compaction`,
which needs a second of a processor for twenty thousand calls, and holds DuckDB so that the gateway need not. What is
still to be shipped waits. Whatever is interrupted is done by the next start.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from gateway.billing.ledger.chain import compactable_segments
from gateway.billing.ledger.writer import Ledger

LOOK_SECONDS = 15.0  # how often it looks for a segment that was closed
SEGMENT_SECONDS_MAX = 600.0  # for one, after which it is left as it is

log = logging.getLogger(__name__)


class Compactor:
    """`run` it from the ledger's opening to its closing."""

    def __init__(self, ledger: Ledger) -> None:
        self.segments_compacted = 0  # since the start
        self._ledger = ledger
        self._given_up: set[Path] = set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.catch_up()
            await asyncio.sleep(LOOK_SECONDS)

    async def catch_up(self) -> None:
        """Compact all that is closed and, where rows are shipped, shipped."""
        durable_segment, _ = self._ledger.durable_end
        for file in await asyncio.to_thread(compactable_segments, self._ledger.folder):
            number = int(file.stem)
            if number < durable_segment and self._ledger.may_remove_segment(number) and file not in self._given_up:
                await self._compact(file)

    async def _compact(self, file: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.billing.ledger.compaction", str(file), stderr=asyncio.subprocess.PIPE
        )
        said = b""
        try:
            async with asyncio.timeout(SEGMENT_SECONDS_MAX):
                _, said = await process.communicate()
        except TimeoutError:
            said = f"it took more than {SEGMENT_SECONDS_MAX:.0f} s".encode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            self.segments_compacted += 1
        else:
            self._given_up.add(file)
            lines = said.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
            log.error("%s stays as lines until the next start: %s", file, lines[-1])
