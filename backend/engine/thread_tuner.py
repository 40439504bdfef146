"""Chooses the number of compute threads again under load, between two steps.

Cores are shared: a neighbour that takes one of two cores can make a step with two threads slower than with one. So the
number is measured again (threads.py) in two cases. Decode steps take longer than steps of as many sequences took
before. Or some cores are unused, and for a while nothing was measured: a neighbour may have left.

A measurement pauses all requests for about a tenth of a second, or longer on a busy machine, so it is rare. Results do
not depend on the number of threads.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from backend.engine.plan import ScheduledRequest
from backend.engine.resolved_config import NATIVE, ResolvedConfig
from backend.engine.threads import ThreadChoice, choose_again, num_cores
from backend.native import library

WINDOW_STEPS = 16  # decode steps of a similar number of sequences, whose median time is compared
MAX_SLOWDOWN = 1.5  # of this median, over the lowest one since the last measurement
MIN_PAUSE_SECONDS = 10.0  # between two measurements
FIRST_PAUSE_SECONDS = 60.0  # the same if steps are not slow; doubles with each measurement that changes nothing
LAST_PAUSE_SECONDS = 600.0

logger = logging.getLogger(__name__)  # INFO: changes, with the reason

Choose = Callable[[int, int], ThreadChoice]  # from the number of cores and the current number of threads


class ThreadTuner:
    """Decides when the number of threads is chosen again, and applies it. Belongs to the engine's thread."""

    def __init__(
        self,
        num_threads: int,
        choose: Choose,
        apply: Callable[[int], None],
        cores: Callable[[], int] = num_cores,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_threads = num_threads
        self._choose = choose
        self._apply = apply
        self._cores = cores
        self._clock = clock
        self._due: str | None = None  # the reason for a measurement before the next step
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._begin_window(clock())

    def begin_step(self, before_pause: Callable[[], None]) -> None:
        """Chooses again if that is due, after a call of `before_pause`. Then starts the clock of the step."""
        if self._due is not None:
            before_pause()
            self.choose_now(self._due)
        self._step_began = self._clock()

    def end_step(self, plan: Sequence[ScheduledRequest]) -> None:
        """Notes how long a step took. Steps with prompts differ too much to be compared."""
        if any(scheduled.num_tokens > 1 for scheduled in plan):
            return
        now = self._clock()
        size = len(plan).bit_length()  # similar numbers of sequences are compared
        steps = self._steps[size]
        steps.append(now - self._step_began)
        if len(steps) == WINDOW_STEPS:
            seconds = statistics.median(steps)
            steps.clear()
            expected = self._expected.setdefault(size, seconds)
            self._expected[size] = min(seconds, expected)
            self._due = self._reason(seconds / expected, now - self._measured_at)

    def _reason(self, slowdown: float, seconds_since: float) -> str | None:
        """Why the number of threads has to be chosen again; None if it has not."""
        if slowdown > MAX_SLOWDOWN and seconds_since >= MIN_PAUSE_SECONDS:
            return f"decode steps take {slowdown:.1f} times as long as before"
        if seconds_since >= self._pause_seconds and self._num_threads < self._cores():
            return "some cores were not used"
        return None

    def choose_now(self, reason: str) -> None:
        """Measures, applies the choice and logs a change. Only between two steps."""
        self._due = None
        cores, before = self._cores(), self._num_threads
        choice = self._choose(cores, before)
        if choice.count == before:
            self._pause_seconds = min(2 * self._pause_seconds, LAST_PAUSE_SECONDS)
        else:
            self._pause_seconds = FIRST_PAUSE_SECONDS
            self._num_threads = choice.count
            self._apply(choice.count)
            why = f"{reason}: {choice.reason} (load {os.getloadavg()[0]:.1f} on {cores} cores)"
            logger.info("compute threads: %d instead of %d, because %s", choice.count, before, why)
        self._begin_window(self._clock())

    def _begin_window(self, now: float) -> None:
        """Forgets what steps took, since another number of threads or other neighbours change it."""
        self._measured_at = now
        self._expected: dict[int, float] = {}
        self._steps: defaultdict[int, list[float]] = defaultdict(list)


def create_tuner(config: ResolvedConfig, apply: Callable[[int], None]) -> ThreadTuner | None:
    """None if the number of threads is fixed: it is configured, or the native kernels do not compute."""
    native = library.load() if config.ops == NATIVE and config.adapts_threads else None
    if native is None:
        return None
    return ThreadTuner(config.num_threads, lambda cores, current: choose_again(native, cores, current), apply)
