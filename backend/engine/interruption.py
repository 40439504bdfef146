"""Abandons a running step when a request arrives that is more urgent than all requests in the step.

A step of background prompts takes as long as hundreds of tokens, and a request that arrives meanwhile would wait for
all of it. Abandoning the step costs only the time spent on it: no request has advanced, and what was written to the KV
cache is written again. The runner checks for an interruption between layers. At most `WASTED_SHARE` of the engine's
time is spent on abandoned steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from backend.engine.plan import ScheduledRequest

WASTED_SHARE = 0.1  # of the engine's time that may be spent on abandoned steps
MAX_CREDIT_SECONDS = 2.0  # that may be wasted at once, after a long time without interruptions


def do_nothing() -> None:
    pass


class Interruption:
    """Decides whether the running step is abandoned.

    `arriving` is the priority of the most urgent request that the engine has not seen yet. It is written by the thread
    that submits requests, and read by the engine's thread.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.arriving = math.inf
        self.num_interrupted = 0
        self._clock = clock
        self._most_urgent = -math.inf
        self._step_began = clock()
        self._credit_seconds = MAX_CREDIT_SECONDS

    def start_step(
        self, plan: Sequence[ScheduledRequest], on_launch: Callable[[], None] = do_nothing
    ) -> Callable[[], bool]:
        """Starts a step. Returns the function that the runner calls to learn whether the step is interrupted.

        The runner calls it first when everything is prepared and the kernels begin, then between layers, and not again
        after it has returned True. Each call also calls `on_launch`.
        """
        now = self._clock()
        earned = WASTED_SHARE * (now - self._step_began)
        self._credit_seconds = min(MAX_CREDIT_SECONDS, self._credit_seconds + earned)
        self._step_began = now
        self._most_urgent = min([scheduled.request.priority for scheduled in plan])

        def is_interrupted() -> bool:
            on_launch()
            return self._is_due()

        return is_interrupted

    def _is_due(self) -> bool:
        if self.arriving >= self._most_urgent or self._credit_seconds <= 0.0:
            return False
        self._credit_seconds -= self._clock() - self._step_began
        self.num_interrupted += 1
        return True
