"""Memory and descriptors of the processes that live through the run: do they grow?

The smallest number of descriptors and the median memory of two windows are compared: one after the warm-up, and the
last. Bursts come and go in both, so only what stays is seen.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 1.0
WARM_SHARE = (0.3, 0.5)  # of the run: the window after the warm-up
END_SHARE = (0.85, 1.0)
MEMORY_GROWTH_MAX = 0.10  # of the memory after the warm-up, and ...
MEMORY_GROWTH_BYTES = 24 * 2**20  # ... this much for caches that have not yet reached their bound
DESCRIPTOR_GROWTH_MAX = 12  # idle connections to deployments, and slow clients that are there by chance


class Sample(NamedTuple):
    seconds: float  # since the start
    pid: int
    memory_bytes: int
    descriptors: int


class Growth(NamedTuple):
    name: str
    memory: tuple[int, int]  # bytes after the warm-up, and at the end
    descriptors: tuple[int, int]

    @property
    def flat(self) -> bool:
        allowed = self.memory[0] * (1 + MEMORY_GROWTH_MAX) + MEMORY_GROWTH_BYTES
        return self.memory[1] <= allowed and self.descriptors[1] <= self.descriptors[0] + DESCRIPTOR_GROWTH_MAX

    def __str__(self) -> str:
        memory = " to ".join(f"{each / 2**20:.0f}" for each in self.memory)
        return f"{self.name}: {memory} MiB, {self.descriptors[0]} to {self.descriptors[1]} descriptors"


class Watch:
    """Samples the processes. Run `run` as a task."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._samples: dict[str, list[Sample]] = defaultdict(list)

    async def run(self, pids: Callable[[], dict[str, int]]) -> None:
        while True:
            for name, pid in pids().items():
                if (sample := self._sample(pid)) is not None:
                    self._samples[name].append(sample)
            await asyncio.sleep(SAMPLE_SECONDS)

    def _sample(self, pid: int) -> Sample | None:
        folder = Path(f"/proc/{pid}")
        try:
            pages = int((folder / "statm").read_text().split()[1])
            descriptors = sum(1 for _ in (folder / "fd").iterdir())
            return Sample(time.monotonic() - self._began, pid, pages * os.sysconf("SC_PAGE_SIZE"), descriptors)
        except OSError:
            return None

    def growth(self) -> Iterator[Growth]:
        """How each process has grown. A process that was restarted since the warm-up is omitted."""
        for name, samples in self._samples.items():
            end = samples[-1].seconds
            warm, last = (
                [each for each in samples if low * end <= each.seconds <= high * end]
                for low, high in (WARM_SHARE, END_SHARE)
            )
            if warm and last and {each.pid for each in warm} == {each.pid for each in last}:
                memory = [int(statistics.median(each.memory_bytes for each in window)) for window in (warm, last)]
                descriptors = [min(each.descriptors for each in window) for window in (warm, last)]
                yield Growth(name, (memory[0], memory[1]), (descriptors[0], descriptors[1]))
