"""Slots of batch lines, given to tenants in turns.

Lines of all batches share one bound on concurrency. If lines wait, the next slot goes to the tenant that was served
longest ago, which then goes to the end of the queue. So a tenant with many lines or batches never delays another
tenant's next line by more than one line of each other tenant.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """A semaphore whose waiters are served in turns by tenant, first come first served within one. Not thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # in the order of turns

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot for one line of a tenant."""
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._free += 1
            self._grant()

    async def _acquire(self, tenant: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # it was granted in the same moment
                self._free += 1
                self._grant()
            raise

    def _grant(self) -> None:
        while self._free and self._waiting:
            tenant, waiters = next(iter(self._waiting.items()))
            waiter = waiters.popleft()
            if waiters:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not waiter.done():  # a cancelled line takes no turn
                self._free -= 1
                waiter.set_result(None)
