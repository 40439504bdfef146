"""A stream that may be cut: what it may still cost, and where more comes from.

A stream without `max_tokens` may come to cost more than was reserved for it. Where the policy says `cut_streams`, it
then asks its budgets for more, a slice at a time, while it goes on; when there is nothing left, it ends. It so
overruns by what comes while the storage is asked, and by one chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gateway.core.errors import BudgetSpent, StorageUnavailable
from gateway.limits.budget import Budget
from gateway.storage.base import Grant, Rejection

ASK_AGAIN_SECONDS = 1.0  # while the storage is away: the stream goes on
MAX_SLICES = 1_000  # of one stream, so that it can not ask for ever


class StreamBudget:
    """`reserve(number, nanos)` and `give_back(number)` are one slice's; `reserved_nanos` the reservation's own."""

    def __init__(
        self,
        reserved_nanos: int,
        slice_nanos: int,
        reserve: Callable[[int, int], Awaitable[Grant | Rejection]],
        give_back: Callable[[int], None],
        limits: Sequence[Budget],
    ) -> None:
        self._may_cost = reserved_nanos
        self._slice = max(1, slice_nanos)
        self._reserve = reserve
        self._give_back = give_back
        self._limits = limits
        self._slices: list[int] = []
        self._asked = 0
        self._asking: asyncio.Task[None] | None = None
        self._ask_after = 0.0
        self._spent: BudgetSpent | None = None

    def check(self, cost_nanos: int) -> None:
        """What the answer costs by now. Raises `BudgetSpent` where that is more than there is."""
        if cost_nanos <= self._may_cost:
            return
        if self._spent is not None:
            raise self._spent
        loop = asyncio.get_running_loop()
        if self._asking is None and loop.time() >= self._ask_after:
            self._asking = loop.create_task(self._ask_for_more(cost_nanos - self._may_cost))

    async def end(self) -> None:
        """Give back what was asked for beyond the reservation, which is settled to the whole cost."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        for number in self._slices:
            self._give_back(number)

    async def _ask_for_more(self, missing_nanos: int) -> None:
        """A slice beyond what is missing already; or all that is left, if that is enough."""
        try:
            wanted = missing_nanos + self._slice
            verdict = await self._try(wanted)
            if isinstance(verdict, Rejection) and verdict.remaining >= missing_nanos:
                wanted = verdict.remaining
                verdict = await self._try(wanted)
            if isinstance(verdict, Grant):
                self._may_cost += wanted
            else:
                self._spent = self._limits[verdict.index].cut()
        except StorageUnavailable:
            self._ask_after = asyncio.get_running_loop().time() + ASK_AGAIN_SECONDS
        finally:
            self._asking = None

    async def _try(self, nanos: int) -> Grant | Rejection:
        self._asked += 1
        if self._asked > MAX_SLICES:
            return Rejection(0, 0, None)
        verdict = await self._reserve(self._asked, nanos)
        if isinstance(verdict, Grant):
            self._slices.append(self._asked)
        return verdict
