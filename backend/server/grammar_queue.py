"""The queue of requests whose grammars are to be compiled: fair between tenants (cache salts), and bounded.

Compiling happens in processes (backend/engine/grammar_process.py), and the threads here only wait for them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from backend.server.errors import GrammarsBusy

COMPILES_AT_ONCE = 4
COMPILES_PER_SALT = 2
MAX_QUEUED = 256
MAX_QUEUED_PER_SALT = 64

T = TypeVar("T")


class GrammarQueue:
    """Runs compilations, tenants in turn. Used on the event loop only."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COMPILES_AT_ONCE, thread_name_prefix="grammar")
        self._running: dict[str, int] = {}  # by salt
        self._queued: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    async def run(self, salt: str, work: Callable[[], T]) -> T:
        """Runs `work` in a thread when it is the tenant's turn. Raises GrammarsBusy if too much is queued."""
        await self._turn(salt)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._running[salt] -= 1
            if not self._running[salt]:
                del self._running[salt]
            self._start_next()

    def close(self) -> None:
        """Cancels what is queued. Safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, salt: str) -> None:
        waiting = self._queued.get(salt, ())
        if len(waiting) >= MAX_QUEUED_PER_SALT:
            raise GrammarsBusy(f"{MAX_QUEUED_PER_SALT} of your requests wait for their grammars to be compiled.")
        if sum(map(len, self._queued.values())) >= MAX_QUEUED:
            self._displace(salt)
        turn = asyncio.get_running_loop().create_future()
        self._queued.setdefault(salt, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come in the same moment
                self._running[salt] -= 1
                self._start_next()
            elif turn in self._queued.get(salt, ()):
                self._queued[salt].remove(turn)
            raise

    def _displace(self, salt: str) -> None:
        """Refuses the newest request of the tenant with the longest queue, which may be this one."""
        longest = max(self._queued, key=lambda each: len(self._queued[each]))
        error = GrammarsBusy(f"{MAX_QUEUED} requests wait for their grammars to be compiled, most of them yours.")
        if len(self._queued[longest]) <= len(self._queued.get(salt, ())):
            raise error
        displaced = self._queued[longest].pop()
        if not displaced.done():
            displaced.set_exception(error)

    def _start_next(self) -> None:
        for salt in list(self._queued):
            if sum(self._running.values()) >= COMPILES_AT_ONCE:
                return
            queue = self._queued[salt]
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if queue and self._running.get(salt, 0) < COMPILES_PER_SALT:
                self._running[salt] = self._running.get(salt, 0) + 1
                queue.popleft().set_result(None)
                self._queued.move_to_end(salt)
            if not queue:
                del self._queued[salt]
