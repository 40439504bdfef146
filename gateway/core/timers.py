"""One timer for many waits: bounds each wait of each task without a timer per wait, or per task.

`asyncio.timeout` costs two timer handles per use; a stream waits hundreds of times and hardly ever too long. Here a
task notes when a wait begins and ends, which costs next to nothing, and one tick looks now and then at all that wait.
A bound is thus kept to within `TICK_SECONDS`.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

TICK_SECONDS = 0.02


class WaitBound:
    """Cancels its task when one wait lasts longer than `seconds`, or beyond `deadline` (event-loop seconds).

    The task calls `begin` and `end` around each wait. After a cancellation, `expired` tells that it came from here;
    whoever turns it into an error calls `uncancel`. `close` ends the watching.
    """

    __slots__ = ("_loop", "_task", "_ticker", "deadline", "expired", "seconds", "since")

    def __init__(
        self, seconds: float, deadline: float = float("inf"), *, task: asyncio.Task[Any] | None = None
    ) -> None:
        """`task`: the present one, for who has it at hand already."""
        task = task or asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self.seconds = seconds
        self.deadline = deadline
        self.since: float | None = None
        self._ticker: _Ticker | None = None  # from the first wait on
        self.expired = False

    def begin(self) -> None:
        """A wait begins; also where one ends and the next begins at once."""
        self.since = self._loop.time()
        if self._ticker is None:
            self._ticker = _tickers.of(self._loop)
            self._ticker.watch(self)

    def end(self) -> None:
        self.since = None

    def uncancel(self) -> None:
        """The cancellation from here has been dealt with: the task goes on, and so does the watching."""
        self._task.uncancel()
        self.expired = False
        self.since = None

    def close(self) -> None:
        self.since = None
        if self._ticker is not None:
            self._ticker.watched.discard(self)
            self._ticker = None

    def expire(self) -> None:
        """For the ticker, which has seen that this one has waited too long."""
        if not self.expired:
            self.expired = True
            self._task.cancel()


class _Ticker:
    """Looks at all that is watched on one event loop, as long as there is anything."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.watched: set[WaitBound] = set()  # bounded by the calls under way
        self.loop = loop
        self._ticking = False

    def watch(self, bound: WaitBound) -> None:
        self.watched.add(bound)
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = self.loop.time()
        # Without a call for each: a thousand streams are looked at fifty times a second.
        over = [
            bound
            for bound in self.watched
            if (since := bound.since) is not None and (now - since >= bound.seconds or now >= bound.deadline)
        ]
        for bound in over:
            bound.expire()
        if self.watched:
            self.loop.call_later(TICK_SECONDS, self._tick)
        else:
            self._ticking = False


class _Tickers:
    """One for each event loop; that of the loop that asked last is at hand, since mostly there is but one."""

    def __init__(self) -> None:
        self._all: WeakKeyDictionary[asyncio.AbstractEventLoop, _Ticker] = WeakKeyDictionary()
        self._last: _Ticker | None = None

    def of(self, loop: asyncio.AbstractEventLoop) -> _Ticker:
        last = self._last
        if last is not None and last.loop is loop:
            return last
        ticker = self._all.get(loop)
        if ticker is None:
            ticker = self._all[loop] = _Ticker(loop)
        self._last = ticker
        return ticker


_tickers = _Tickers()
