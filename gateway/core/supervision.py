"""Supervision of background tasks: a task that fails is restarted after a pause, and counted.

Everything that a gateway does beside its requests runs in tasks that a `Supervisor` started: settlement, the ledger's
fsync, lease extension, health checks, replica sync and others. A bug in one of them must not stop it for good. Some
work ends when it has nothing to do, such as the ledger's fsync. It is run again until it ends normally.

  work returns   the task is done
  work raises    logged and counted. The work is called again after `FIRST_PAUSE_SECONDS`, doubled for each further
                 failure up to `MAX_PAUSE_SECONDS`, until a run lasts `STABLE_SECONDS`
  it keeps       after `FAILURES_UNTIL_DOWN` failures in a row the task counts as down, until a run lasts
  failing        `STABLE_SECONDS` or returns. /ready names the tasks that are down
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 30.0
STABLE_SECONDS = 10.0  # a run that lasts so long has recovered
FAILURES_UNTIL_DOWN = 3

log = logging.getLogger("warmpath")

Work = Callable[[], Awaitable[None]]


class Supervisor:
    """Starts background tasks and restarts those that fail. All methods must be called on one event loop.

    `failures` counts the failures of each task by its name, since the start.
    """

    def __init__(self) -> None:
        self.failures = Counter[str]()
        self._tasks: set[SupervisedTask] = set()

    def start(self, name: str, work: Work, *, essential: bool = False) -> SupervisedTask:
        """Run `work` in a task, and again whenever it raises an exception.

        `work` must be able to continue where a failed run has stopped. If an `essential` task is down, the gateway
        cannot do its work for clients and is not ready.
        """
        task = SupervisedTask(self, name, work, essential=essential)
        self._tasks.add(task)
        task.begin()
        return task

    def down(self) -> dict[str, str]:
        """Return the tasks that keep failing, by name, each with its last error."""
        return {task.name: task.last_error for task in self._tasks if task.is_down}

    def essential_down(self) -> list[str]:
        """Return the names of the essential tasks that keep failing."""
        return sorted(task.name for task in self._tasks if task.is_down and task.essential)

    def ended(self, task: SupervisedTask) -> None:
        """Forget a task. Called by the task when it ends."""
        self._tasks.discard(task)


class SupervisedTask:
    """One background task of a `Supervisor`. End it with `join` or `cancel`."""

    def __init__(self, supervisor: Supervisor, name: str, work: Work, *, essential: bool) -> None:
        self.name = name
        self.essential = essential
        self.last_error = ""
        self._supervisor = supervisor
        self._work = work
        self._failures_in_a_row = 0
        self._run_began: float | None = None  # event-loop seconds; None in a pause
        self._ending = asyncio.Event()  # set if the work is not to be restarted
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start the task. Called once, by the supervisor."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self.name)
        self._task.add_done_callback(lambda _: self._supervisor.ended(self))

    def is_done(self) -> bool:
        """Whether the work has ended and is not restarted."""
        return self._task is not None and self._task.done()

    @property
    def is_down(self) -> bool:
        """Whether the work keeps failing."""
        return self._failures_in_a_row >= FAILURES_UNTIL_DOWN and not self._is_stable()

    async def join(self) -> None:
        """Wait until the work returns. If it fails, or has failed, it is not restarted."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def cancel(self) -> None:
        """Cancel the work, and wait until it has ended."""
        self._ending.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._run_began = loop.time()
            try:
                await self._work()
                return
            except Exception as error:  # noqa: BLE001 (any bug; it is logged)
                pause_seconds = self._failed(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._ending.wait()
                    return

    def _failed(self, error: Exception) -> float:
        """Log and count a failure. Returns the pause before the next run, in seconds."""
        if self._is_stable():
            self._failures_in_a_row = 0
        self._failures_in_a_row += 1
        self._run_began = None
        self._supervisor.failures[self.name] += 1
        self.last_error = type(error).__name__  # no message: it may contain a client's text, and /ready shows this
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** (self._failures_in_a_row - 1), MAX_PAUSE_SECONDS)
        log.error(
            "background task %r failed (%d in a row); it is restarted in %g s",
            self.name, self._failures_in_a_row, pause_seconds, exc_info=error,
        )  # fmt: skip
        return pause_seconds

    def _is_stable(self) -> bool:
        """Whether the present run has lasted long enough to have recovered."""
        now = asyncio.get_running_loop().time()
        return self._run_began is not None and now - self._run_began >= STABLE_SECONDS
