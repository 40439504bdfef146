"""Settles reservations to the actual usage once the calls' receipts are durable. One task settles those of many calls.

No call waits for its own settlement. One `fsync` makes the receipts of many calls durable, and a shared storage batches
the settlements of many calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

from gateway.billing.ledger import Ledger
from gateway.core.errors import BudgetSpent, LedgerUnavailable, LimitReached
from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.limits.limiter import Limiter, Reservation
from gateway.types import Call, Usage

MAX_CONCURRENT_SETTLEMENTS = 16  # storage operations in flight, so that a shared storage can batch them
SETTLE_WAIT_SECONDS = 0.25  # how long a call that a limit rejects waits at most for its tenant's unsettled calls

log = logging.getLogger(__name__)


class Settler:
    """Settles reservations once their receipts are durable. Settles all those of one fsync together.

    All methods must be called on the same event loop. When a call has ended, its concurrency slot is already free. Its
    unused tokens and money are released a little later, by the settlement. Unsettled calls do not get other calls
    rejected, because `admit` waits for them first. If a receipt cannot be made durable, or if settling a call fails,
    that call's reservation is not settled, and its lease expires. Other calls are settled nevertheless.
    """

    def __init__(self, limiter: Limiter, ledger: Ledger, supervisor: Supervisor | None = None) -> None:
        self.failed = 0  # settlements that failed by a bug, since the start; the leases of their reservations expire
        self._supervisor = supervisor or Supervisor()
        self._limiter = limiter
        self._ledger = ledger  # bounds how many settlements can be due
        self._due: list[tuple[Reservation, Usage, int, str]] = []
        self._unsettled = Counter[str]()  # calls by tenant
        self._batch_settled = asyncio.Event()  # set when the batch that the task works on is settled
        self._due_settled = asyncio.Event()  # set when `_due`, the next batch, is settled
        self._task: SupervisedTask | None = None

    async def admit(self, call: Call, *, from_slices: bool, from_cache: bool = False) -> Reservation:
        """Reserve the limits of a call, or of an answer from the response cache. Raises the errors of `Limiter.admit`.

        `from_slices` is whether the receipt will be written to this gateway's ledger as soon as the call ends.

        If a limit rejects the call, waits for the tenant's unsettled calls and then tries a second time.
        """
        admit = self._limiter.admit_cache_hit if from_cache else self._limiter.admit
        try:
            return await admit(call, from_slices=from_slices)
        except (LimitReached, BudgetSpent):
            if call.principal.tenant_name not in self._unsettled:
                raise
        await self._settle_now()
        return await admit(call, from_slices=from_slices)

    def settle(self, reservation: Reservation, usage: Usage, cost_nanos: int, tenant: str) -> None:
        """Queue a reservation. It is settled when all rows that are in the ledger now are durable."""
        self._due.append((reservation, usage, cost_nanos, tenant))
        self._unsettled[tenant] += 1
        if self._task is None or self._task.is_done():
            self._task = self._supervisor.start("ledger settle", self._settle_due, essential=True)

    async def stop(self) -> None:
        """Settle all queued reservations."""
        while self._task is not None and not self._task.is_done():
            with contextlib.suppress(LedgerUnavailable):
                await self._ledger.durable(flush_now=True)
            await self._task.join()
        await self._settle_due()  # what is left if the task had failed and was not restarted

    async def _settle_now(self) -> None:
        # The newest settlements are in `_due`, if it has any, else in the batch that the task works on.
        settled = self._due_settled if self._due else self._batch_settled
        with contextlib.suppress(TimeoutError, LedgerUnavailable):
            async with asyncio.timeout(SETTLE_WAIT_SECONDS):
                await self._ledger.durable(flush_now=True)
                await settled.wait()

    async def _settle_due(self) -> None:
        while self._due:
            due, self._due = self._due, []
            self._batch_settled, self._due_settled = self._due_settled, asyncio.Event()
            try:
                await self._ledger.durable()
                rest = iter(due)
                first = asyncio.ensure_future(self._settle_each(rest))
                await asyncio.sleep(0)  # `first` settles all of them here if the storage is in this process
                lanes = 0 if first.done() else min(MAX_CONCURRENT_SETTLEMENTS, len(due)) - 1
                await asyncio.gather(first, *[self._settle_each(rest) for _ in range(lanes)])
            except LedgerUnavailable:
                pass  # already logged by the ledger; nothing is settled until the gateway restarts
            finally:
                for _, _, _, tenant in due:
                    self._unsettled[tenant] -= 1
                    if not self._unsettled[tenant]:
                        del self._unsettled[tenant]
                self._batch_settled.set()
        self._task = None

    async def _settle_each(self, due: Iterator[tuple[Reservation, Usage, int, str]]) -> None:
        for reservation, usage, cost_nanos, tenant in due:
            try:
                await reservation.settle(usage, cost_nanos)
            except Exception:
                self.failed += 1
                log.exception("a call of the tenant %r could not be settled; its reservation expires", tenant)
