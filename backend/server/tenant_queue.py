"""Queues for work in threads that all requests share: fair between tenants (cache salts), and bounded.

The tenant with most work waiting pays for a full queue. Between two pieces of a tenant's work, each other tenant has at
most one turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from backend.server.errors import TenantBusy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How much of one kind of work may run and wait."""

    running: int
    running_per_tenant: int
    waiting: int
    waiting_per_tenant: int


class TenantQueue:
    """Runs work in its threads, tenants in turn. Used on the event loop only."""

    def __init__(self, bounds: QueueBounds, name: str, work: str, busy: type[TenantBusy] = TenantBusy) -> None:
        """`name`: of the threads. `work`: what waits, for the message of `busy`, as in "images wait to be decoded"."""
        self.threads = ThreadPoolExecutor(bounds.running, thread_name_prefix=name)
        self._bounds = bounds
        self._work = work
        self._busy = busy
        self._running: dict[str, int] = {}  # by salt
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    async def run(self, salt: str, work: Callable[[], T]) -> T:
        """Runs `work` in a thread when it is the tenant's turn. Raises `busy` if too much waits."""
        async with self.turn(salt):
            return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread, within a turn."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def close(self) -> None:
        """Cancels what its threads have not begun. Safe to call twice."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def turn(self, salt: str) -> AsyncIterator[None]:
        """Waits for the tenant's turn, which lasts until the end of the block. Raises `busy` if too much waits."""
        await self._wait(salt)
        try:
            yield
        finally:
            self._end(salt)

    async def _wait(self, salt: str) -> None:
        most = self._bounds.waiting_per_tenant
        if len(self._waiting.get(salt, ())) >= most:
            raise self._busy(f"{most} of your {self._work}.")
        if sum(map(len, self._waiting.values())) >= self._bounds.waiting:
            self._displace(salt)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(salt, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come in the same moment
                if turn.exception() is None:
                    self._end(salt)
            elif turn in self._waiting.get(salt, ()):
                self._waiting[salt].remove(turn)
            raise

    def _end(self, salt: str) -> None:
        self._running[salt] -= 1
        if not self._running[salt]:
            del self._running[salt]
        self._start_next()

    def _displace(self, salt: str) -> None:
        """Refuses the newest work of the tenant with the longest queue, which may be this one."""
        longest = max(self._waiting, key=lambda each: len(self._waiting[each]))
        error = self._busy(f"{self._bounds.waiting} {self._work}, most of them yours.")
        if len(self._waiting[longest]) <= len(self._waiting.get(salt, ())):
            raise error
        displaced = self._waiting[longest].pop()
        if not displaced.done():
            displaced.set_exception(error)

    def _start_next(self) -> None:
        for salt in list(self._waiting):
            if sum(self._running.values()) >= self._bounds.running:
                return
            queue = self._waiting[salt]
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if queue and self._running.get(salt, 0) < self._bounds.running_per_tenant:
                self._running[salt] = self._running.get(salt, 0) + 1
                queue.popleft().set_result(None)
                self._waiting.move_to_end(salt)
            if not queue:
                del self._waiting[salt]
