"""Giving up a running step for somebody more urgent than all who are in it.

A step of background prompts takes as long as hundreds of tokens do, and whoever arrives meanwhile would wait for all of
it. Nothing is lost by leaving it but the time: nobody has advanced, and what was written into the cache will be written
again. So the runner asks between layers, and no more than a share of the engine's time is spent in vain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from backend.engine.plan import ScheduledRequest

SHARE_IN_VAIN = 0.1  # of all time
MAX_CREDIT_SECONDS = 2.0  # that may be spent in vain at once, after a long time without


def nothing() -> None:
    pass


class Interruption:
    """`arriving` is written by whoever brings work: the priority of the most urgent that the engine has not seen."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.arriving = math.inf
        self.num_interrupted = 0
        self._clock = clock
        self._most_urgent = -math.inf
        self._began = clock()
        self._credit_seconds = MAX_CREDIT_SECONDS

    def watch(self, plan: Sequence[ScheduledRequest], begun: Callable[[], None] = nothing) -> Callable[[], bool]:
        """For a step that begins now: whether it is to be given up, to be asked until the answer is yes, and first when
        all is prepared and the kernels begin. Whenever it is asked, `begun` is called."""
        now = self._clock()
        earned = SHARE_IN_VAIN * (now - self._began)
        self._credit_seconds = min(MAX_CREDIT_SECONDS, self._credit_seconds + earned)
        self._began = now
        self._most_urgent = min(scheduled.request.priority for scheduled in plan)

        def is_interrupted() -> bool:
            begun()
            return self._is_due()

        return is_interrupted

    def _is_due(self) -> bool:
        if self.arriving >= self._most_urgent or self._credit_seconds <= 0.0:
            return False
        self._credit_seconds -= self._clock() - self._began
        self.num_interrupted += 1
        return True
