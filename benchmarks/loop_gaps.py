"""Runs the gateway and records how much CPU time its process uses between two turns of the event loop.

    LOOP_GAPS=FILE python -m benchmarks.loop_gaps serve --policy FILE --port 0

A timer of the event loop notes the process's CPU time at each turn. While one callback runs, or another thread holds
Python's lock, the loop makes no turn, and the CPU time grows. Other programs on the machine do not use this process's
CPU time, so they change the figures little. Each line of the file has one gap of more than a millisecond, in
milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, TextIO

from gateway.__main__ import main
from gateway.server import listener

TURN_SECONDS = 0.0005
NOTED_SECONDS = 0.001
FILE = "LOOP_GAPS"


class Turns:
    """The timer."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._since = time.process_time()

    def turn(self) -> None:
        gap_seconds = time.process_time() - self._since
        if gap_seconds > NOTED_SECONDS:
            self._file.write(f"{gap_seconds * 1000:.2f}\n")
        self._since = time.process_time()
        self._loop.call_later(TURN_SECONDS, self.turn)


def longest_gap_ms(file: Path, offset: int) -> float:
    """The longest gap that was noted after an offset of the file."""
    return max(map(float, file.read_text()[offset:].split()), default=0.0)


def _record() -> None:
    start = listener.Server.startup
    file = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115 - open as long as the process runs

    async def startup(server: listener.Server, *arguments: object, **named: object) -> None:
        await start(server, *arguments, **named)  # type: ignore[arg-type]
        Turns(file).turn()

    server: Any = listener.Server
    server.startup = startup


if __name__ == "__main__":
    _record()
    main()
