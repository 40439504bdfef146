"""Timeouts for many short waits, with one timer per event loop.

A stream waits for hundreds of chunks, and these waits rarely time out. `asyncio.timeout` costs two timer handles for
each wait. Here a task only notes when a wait begins and ends, which costs almost nothing, and a periodic tick checks
all waits. A timeout is therefore accurate to `TICK_SECONDS`.

A wait counts only the time during which the event loop runs. If the loop is busy or the process is suspended, a tick
comes late, and no wait counts the delay. An answer that arrives meanwhile is therefore read before a timeout can
expire, and the gateway does not mistake its own slowness for that of a storage or a deployment.

`WaitBound` and `time_bound` are the interface. `_LoopTimer` is the ticking timer of one event loop, `_LoopTimers` finds
the timer of a loop. All of it runs on the event loop; it is not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakKeyDictionary

TICK_SECONDS = 0.02
LATE_SECONDS = 0.005  # a tick that is later than this means that the event loop did not run


class WaitBound:
    """Cancels its task if one wait lasts longer than `seconds`, or past `deadline` (event-loop seconds).

    The seconds are those during which the event loop runs. A deadline that a client set is absolute.

    The task calls `begin` and `end` around each wait. If `expired` is true after a cancellation, this object has
    cancelled the task. The code that turns the cancellation into an error calls `uncancel`. `close` stops the checks.
    """

    __slots__ = ("_loop", "_task", "_timer", "deadline", "expired", "refresh", "seconds", "since")

    def __init__(
        self, seconds: float, deadline: float = float("inf"), *, task: asyncio.Task[Any] | None = None
    ) -> None:
        """Bound the waits of `task`, which defaults to the current task. Passing the task saves the lookup."""
        task = task or asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self.seconds = seconds
        self.deadline = deadline
        self.since: float | None = None
        self.refresh: Callable[[], None] | None = None  # updates `since`, if it is not set whenever a wait begins
        self._timer: _LoopTimer | None = None  # set from the first wait on
        self.expired = False

    def begin(self) -> None:
        """Start a wait. If a wait is already running, it ends first."""
        self.since = self._loop.time()
        if self._timer is None:
            self._timer = _loop_timers.of(self._loop)
            self._timer.watch(self)

    def end(self) -> None:
        """End the wait."""
        self.since = None

    def uncancel(self) -> None:
        """Clear the cancellation that this object caused: the task continues, and so do the checks."""
        self._task.uncancel()
        self.expired = False
        self.since = None

    @property
    def cancellations(self) -> int:
        """The number of cancellations of the task that are requested and not cleared."""
        return self._task.cancelling()

    def close(self) -> None:
        """Stop the checks. After this, the object cancels the task no more."""
        self.since = None
        if self._timer is not None:
            self._timer.bounds.discard(self)
            self._timer = None

    def expire(self) -> None:
        """Cancel the task. Called by the timer."""
        if not self.expired:
            self.expired = True
            self._task.cancel()


@contextlib.asynccontextmanager
async def time_bound(seconds: float) -> AsyncIterator[None]:
    """Raise `TimeoutError` if the block takes longer than `seconds` during which the event loop runs."""
    bound = WaitBound(seconds)
    cancelled_before = bound.cancellations
    bound.begin()
    try:
        yield
    except asyncio.CancelledError:
        if not bound.expired:
            raise
        bound.uncancel()
        if bound.cancellations > cancelled_before:  # the task was also cancelled from elsewhere
            raise
        raise TimeoutError from None
    finally:
        bound.close()


class _LoopTimer:
    """Checks all waits of one event loop every `TICK_SECONDS`. Stops ticking while there is nothing to check."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.bounds: set[WaitBound] = set()  # at most a few per call in flight
        self.loop = loop
        self._ticking = False
        self._due = 0.0  # when the next tick is due
        self._earliest = math.inf  # no wait can be over before: a wait that begins later ends later

    def watch(self, bound: WaitBound) -> None:
        """Check a bound, whose wait has begun."""
        since = bound.since
        assert since is not None
        self.bounds.add(bound)
        end = since + bound.seconds
        if bound.deadline < end:
            end = bound.deadline
        if end < self._earliest:
            self._earliest = end
        if not self._ticking:
            self._ticking = True
            self._schedule(since)

    def _schedule(self, now: float) -> None:
        self._due = now + TICK_SECONDS
        self.loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late_seconds = self.loop.time() - self._due
        if late_seconds > LATE_SECONDS:
            for bound in self.bounds:
                if bound.refresh is not None:
                    bound.refresh()
                if bound.since is not None:  # a wait that began during the delay counts from now on
                    bound.since = min(bound.since + late_seconds, self._due + late_seconds)
            # The tasks whose answers arrived during the delay run before the check.
            self.loop.call_soon(self._check)
        else:
            self._check()

    def _check(self) -> None:
        now = self.loop.time()
        if now >= self._earliest:
            self._earliest = math.inf
            for bound in self.bounds:
                if bound.refresh is not None:
                    bound.refresh()
                since = now if bound.since is None else bound.since
                end = since + bound.seconds
                if bound.deadline < end:
                    end = bound.deadline
                if end < self._earliest:
                    self._earliest = end
                if end <= now and bound.since is not None:
                    bound.expire()
        if self.bounds:
            self._schedule(now)
        else:
            self._ticking = False


class _LoopTimers:
    """The timer of each event loop. Caches the one used last, since a process usually has a single event loop."""

    def __init__(self) -> None:
        self._all: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopTimer] = WeakKeyDictionary()
        self._last: _LoopTimer | None = None

    def of(self, loop: asyncio.AbstractEventLoop) -> _LoopTimer:
        last = self._last
        if last is not None and last.loop is loop:
            return last
        timer = self._all.get(loop)
        if timer is None:
            timer = self._all[loop] = _LoopTimer(loop)
        self._last = timer
        return timer


_loop_timers = _LoopTimers()
