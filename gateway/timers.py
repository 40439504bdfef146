"""One timer for many waits: bounds each wait of a task without a timer per wait.

`asyncio.timeout` costs two timer handles per use; a stream waits hundreds of times and hardly ever too long. Here the
task notes when a wait begins and ends, and one handle looks now and then whether the present wait is too old.
"""

from __future__ import annotations

import asyncio
from typing import Any


class WaitBound:
    """Cancels its task when one wait lasts longer than `seconds`, or beyond `deadline` (event-loop seconds).

    The task calls `begin` and `end` around each wait. After a cancellation, `expired` tells that it came from here;
    whoever turns it into an error calls `uncancel`. `close` ends the watching.
    """

    __slots__ = ("_deadline", "_handle", "_loop", "_seconds", "_since", "_task", "expired")

    def __init__(
        self, seconds: float, deadline: float = float("inf"), *, task: asyncio.Task[Any] | None = None
    ) -> None:
        """`task`: the present one, for who has it at hand already."""
        task = task or asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._deadline = deadline
        self._since: float | None = None
        self.expired = False
        self._handle: asyncio.TimerHandle | None = None  # from the first wait on

    def begin(self) -> None:
        """A wait begins; also where one ends and the next begins at once."""
        self._since = since = self._loop.time()
        if self._handle is None or since >= self._deadline:  # which may have passed between two waits
            self._look_at(max(since, min(since + self._seconds, self._deadline)))

    def end(self) -> None:
        self._since = None

    def uncancel(self) -> None:
        """The cancellation from here has been dealt with: the task goes on, and so does the watching."""
        self._task.uncancel()
        self.expired = False
        self._since = None
        self._look_at(self._loop.time() + self._seconds)

    def close(self) -> None:
        self._since = None
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        now, since = self._loop.time(), self._since
        if since is not None and now >= min(since + self._seconds, self._deadline):
            self.expired = True
            self._task.cancel()
            return
        begun = now if since is None else since
        soonest = min(begun + self._seconds, self._deadline if self._deadline > now else begun + self._seconds)
        self._look_at(soonest)

    def _look_at(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(when, self._look)
