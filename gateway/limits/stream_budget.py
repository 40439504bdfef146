"""Stream budget: reserves more money while a stream continues, and cuts the stream if its budget is spent.

A stream without `max_tokens` may cost more than its reservation. If the policy sets `cut_streams`, the stream then
reserves more money from its budgets, one slice at a time, while it continues. If no money is left, the stream is ended.
The budget can be exceeded by the cost of the tokens streamed during one storage round trip, and of one chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gateway.core.errors import BudgetSpent, StorageUnavailable
from gateway.limits.budget import BudgetLimit
from gateway.storage.base import Grant, Rejection

RETRY_SECONDS = 1.0  # between two attempts while the storage is unreachable; the stream continues meanwhile
MAX_SLICES = 1_000  # of one stream, so that its reservations are bounded


class StreamBudget:
    """The money that one stream may use. Not thread-safe.

    `reserve(number, nanos)` reserves a numbered slice, and `give_back(number)` releases the slice. `reserved_nanos` is
    the amount in the call's own reservation.
    """

    def __init__(
        self,
        reserved_nanos: int,
        slice_nanos: int,
        reserve: Callable[[int, int], Awaitable[Grant | Rejection]],
        give_back: Callable[[int], None],
        limits: Sequence[BudgetLimit],
    ) -> None:
        self._granted_nanos = reserved_nanos
        self._slice_nanos = max(1, slice_nanos)
        self._reserve = reserve
        self._give_back = give_back
        self._limits = limits
        self._slices: list[int] = []
        self._tries = 0
        self._extension: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._spent: BudgetSpent | None = None

    def check(self, cost_nanos: int) -> None:
        """Compare the answer's cost so far with the reserved money, and reserve more in the background if necessary.

        Raises `BudgetSpent` if the budget has too little money left.
        """
        if cost_nanos <= self._granted_nanos:
            return
        if self._spent is not None:
            raise self._spent
        loop = asyncio.get_running_loop()
        if self._extension is None and loop.time() >= self._retry_at:
            self._extension = loop.create_task(self._extend(cost_nanos - self._granted_nanos))

    async def end(self) -> None:
        """Release all slices. The caller settles the call's own reservation to the total cost of the answer."""
        if self._extension is not None:
            self._extension.cancel()
            await asyncio.wait([self._extension])
        for number in self._slices:
            self._give_back(number)

    async def _extend(self, missing_nanos: int) -> None:
        """Reserve the missing amount and a slice. If too little is left for both, reserve all that is left.

        That happens only if the rest covers the missing amount.
        """
        try:
            wanted = missing_nanos + self._slice_nanos
            verdict = await self._try(wanted)
            if isinstance(verdict, Rejection) and verdict.remaining >= missing_nanos:
                wanted = verdict.remaining
                verdict = await self._try(wanted)
            if isinstance(verdict, Grant):
                self._granted_nanos += wanted
            else:
                self._spent = self._limits[verdict.index].stream_cut()
        except StorageUnavailable:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS
        finally:
            self._extension = None

    async def _try(self, nanos: int) -> Grant | Rejection:
        self._tries += 1
        if self._tries > MAX_SLICES:
            return Rejection(0, 0, None)
        verdict = await self._reserve(self._tries, nanos)
        if isinstance(verdict, Grant):
            self._slices.append(self._tries)
        return verdict
