"""Slots of batch lines, given to tenants in turns.

Lines of all batches share one bound on concurrency. If lines wait, the next slot goes to the outermost tenant that was
served longest ago, which then goes to the end of the queue, and within it in the same way to one of its tenants. So a
tenant with many lines or batches, or an organisation with many tenants, never delays another tenant's next line by more
than one line of each other outermost tenant, and of each other tenant of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """A semaphore whose waiters are served in turns by outermost tenant, then by tenant, then first come first served.

    Not thread-safe.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        # By outermost tenant and tenant, both in the order of turns.
        self._waiting: OrderedDict[str, OrderedDict[str, deque[asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, tenant: str, root: str | None = None) -> AsyncIterator[None]:
        """Hold a slot for one line of a tenant. `root` is its outermost ancestor; by default the tenant itself."""
        await self._acquire(tenant, tenant if root is None else root)
        try:
            yield
        finally:
            self._free += 1
            self._grant()

    async def _acquire(self, tenant: str, root: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(root, OrderedDict()).setdefault(tenant, deque()).append(granted)
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
            root, tenants = next(iter(self._waiting.items()))
            tenant, waiters = next(iter(tenants.items()))
            waiter = waiters.popleft()
            if waiters:
                tenants.move_to_end(tenant)
            else:
                del tenants[tenant]
            if tenants:
                self._waiting.move_to_end(root)
            else:
                del self._waiting[root]
            if not waiter.done():  # a cancelled line takes no turn
                self._free -= 1
                waiter.set_result(None)
