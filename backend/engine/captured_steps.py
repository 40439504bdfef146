"""Captures steps of some sizes at the start, and those of other sizes when they turn out to be needed.

At the start, the sizes that are powers of two are captured, and the largest. A step of another size is padded to the
next larger captured one. A size that was padded for is captured while the engine is idle, or between two steps if it
was needed CAPTURE_AFTER times: this holds up running requests for one capture, at most every PAUSE_SECONDS.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

CAPTURE_AFTER = 64  # steps that were padded because their size was not captured
PAUSE_SECONDS = 10.0  # between two captures while requests run

logger = logging.getLogger(__name__)  # INFO: progress

# Takes the lengths of the step's sequences. A captured step ignores them and reads them on the device.
DecodeStep = Callable[[Sequence[int]], None]


class CapturedSteps:
    """The captured steps by size. Not thread-safe.

    sizes: ascending. capture: captures the step of a size; called for the largest first, whose memory the others reuse.
    """

    def __init__(
        self,
        what: str,
        sizes: Sequence[int],
        capture: Callable[[int], DecodeStep],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._sizes, self._capture, self._clock = what, sizes, capture, clock
        at_start = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
        self._steps = {size: capture(size) for size in reversed(at_start)}
        self._missed: Counter[int] = Counter()  # by size: steps that needed it before it was captured
        self._last_capture = clock()

    def size_for(self, count: int) -> int:
        """The captured size that a step of `count` sequences or tokens is padded to; at most the largest size."""
        exact = next(size for size in self._sizes if size >= count)
        if exact in self._steps:
            return exact
        self._missed[exact] += 1
        return min(size for size in self._steps if size > exact)

    def __getitem__(self, size: int) -> DecodeStep:
        return self._steps[size]

    @property
    def is_due(self) -> bool:
        """Whether a size was needed so often that it is captured although requests run."""
        if not self._missed or self._clock() - self._last_capture < PAUSE_SECONDS:
            return False
        return self._missed.most_common(1)[0][1] >= CAPTURE_AFTER

    def capture_next(self) -> bool:
        """Captures the size that was needed most often. Returns False if every size that was needed is captured.

        Overwrites the buffers that steps read and write, so no step may be in flight whose results are still needed.
        """
        if not self._missed:
            return False
        ((size, _),) = self._missed.most_common(1)
        began = self._clock()
        self._steps[size] = self._capture(size)
        del self._missed[size]
        self._last_capture = self._clock()
        logger.info("captured %s of size %d in %.2f s", self._what, size, self._last_capture - began)
        return True
