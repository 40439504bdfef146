"""Processor time by thread, from Linux's `/proc`: other work on the machine hardly changes it.

The bundled engine computes its steps in one thread. So the time of a step is measured as that thread's processor time,
and what a call costs besides as the time of this process and of all other threads of engines and router.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

OWN = (0, 0)  # stands for this process
NANOSECONDS = 1e-9

Thread = tuple[int, int]  # process and thread


def descendants() -> set[int]:
    """The processes that this one has started, directly or not."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


class Stopwatch:
    """Measures the processor time of this process and of the threads of others. Starts when it is made."""

    def __init__(self, processes: Iterable[int]) -> None:
        self._processes = list(processes)
        self._began = self._read()
        self._own_began = time.process_time()

    def seconds(self) -> dict[Thread, float]:
        """Seconds by thread since it was made. What reading costs is not included."""
        own = time.process_time() - self._own_began
        return {OWN: own} | {thread: now - self._began.get(thread, 0.0) for thread, now in self._read().items()}

    def _read(self) -> dict[Thread, float]:
        found: dict[Thread, float] = {}
        for process in self._processes:
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):  # it has ended
                    computed = (thread / "schedstat").read_text().split()[0]
                    found[process, int(thread.name)] = int(computed) * NANOSECONDS
        return found
