"""What was reserved is settled to the truth once the receipt is durable: that of many calls by one task.

It is apart from the settlement of a call, which does not wait for this: one `fsync` makes the receipts of many calls
durable, and one storage gathers the operations of many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from gateway.billing.ledger import Ledger
from gateway.core.errors import BudgetSpent, LedgerUnavailable, LimitReached
from gateway.limits.limiter import Limiter, Reservation
from gateway.types import Call, Usage

MAX_CONCURRENT_SETTLEMENTS = (
    16  # operations of the storage under way at the same time, so that a shared one gathers them
)
SETTLE_WAIT_SECONDS = 0.25  # at most, before a limit refuses a tenant some of whose calls are over and not yet settled


class Settler:
    """Settles reservations once their receipts are durable, all those of one fsync together, in one task.

    A call that is over has given its place back already; its tokens and its money come back a little later. Nobody is
    refused for these: `admit` waits for them first. What can not be made durable is not settled: its lease runs out.
    """

    def __init__(self, limiter: Limiter, ledger: Ledger) -> None:
        self._limiter = limiter
        self._ledger = ledger  # which bounds how much can be due
        self._due: list[tuple[Reservation, Usage, int, str]] = []
        self._unsettled = Counter[str]()  # by tenant
        self._running = asyncio.Event()  # set when what the task works on is settled
        self._gathering = asyncio.Event()  # and when `_due` is
        self._task: asyncio.Task[None] | None = None

    async def admit(self, call: Call, *, from_cache: bool = False) -> Reservation:
        """As `Limiter.admit`, or its `admit_hit` for an answer from the cache, by what is true."""
        admit = self._limiter.admit_cache_hit if from_cache else self._limiter.admit
        try:
            return await admit(call)
        except (LimitReached, BudgetSpent):
            if call.principal.tenant.name not in self._unsettled:
                raise
        await self._settle_now()
        return await admit(call)

    def settle(self, reservation: Reservation, usage: Usage, cost_nanos: int, tenant: str) -> None:
        """Settle it when every row that the ledger has now is durable."""
        self._due.append((reservation, usage, cost_nanos, tenant))
        self._unsettled[tenant] += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._settle_due(), name="ledger settle")

    async def stop(self) -> None:
        """Settle what is left."""
        while self._task is not None:
            with contextlib.suppress(LedgerUnavailable):
                await self._ledger.durable(flush_now=True)
            await self._task

    async def _settle_now(self) -> None:
        over = self._gathering if self._due else self._running
        with contextlib.suppress(TimeoutError, LedgerUnavailable):
            async with asyncio.timeout(SETTLE_WAIT_SECONDS):
                await self._ledger.durable(flush_now=True)
                await over.wait()

    async def _settle_due(self) -> None:
        while self._due:
            due, self._due = self._due, []
            self._running, self._gathering = self._gathering, asyncio.Event()
            try:
                await self._ledger.durable()
                rest = iter(due)
                first = asyncio.ensure_future(self._settle_each(rest))
                await asyncio.sleep(0)  # in which it has settled all, where the storage is in this process
                lanes = 0 if first.done() else min(MAX_CONCURRENT_SETTLEMENTS, len(due)) - 1
                await asyncio.gather(first, *[self._settle_each(rest) for _ in range(lanes)])
            except LedgerUnavailable:
                pass  # which has said so, and is restarted; nothing settles before
            self._unsettled -= Counter([tenant for _, _, _, tenant in due])
            self._running.set()
        self._task = None

    @staticmethod
    async def _settle_each(due: Iterator[tuple[Reservation, Usage, int, str]]) -> None:
        for reservation, usage, cost_nanos, _ in due:
            await reservation.settle(usage, cost_nanos)
