"""Which batches this gateway works on: it claims those that nobody has, keeps its leases, and gives them back.

Several gateways on one store share the work batch by batch. A lease ends `LEASE_SECONDS` after the death of its owner,
or at once when a gateway of the same name starts again. The clocks of the gateways need to agree within a few seconds
only for the work not to be done twice: results are written by the owner alone, whatever anybody's clock says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter

from gateway.batches.records import Batch, Status, new_id
from gateway.batches.run import Run
from gateway.batches.workshop import LeaseLost, Workshop
from gateway.core.errors import StorageUnavailable

LEASE_SECONDS = 10.0
EXTEND_SECONDS = LEASE_SECONDS / 3
POLL_SECONDS = 1.0  # how soon a batch that was created, cancelled or left elsewhere is noticed
RUNS_MAX = 8  # batches that one gateway works on at the same time
RETRY_SECONDS = 10.0  # after a run that failed
SWEEP_SECONDS = 600.0
SWEPT_AT_ONCE = 100

log = logging.getLogger(__name__)


class BatchWorker:
    """Start and stop it with the application."""

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._not_before: dict[str, float] = {}  # by batch: when a run that failed may be tried again
        self._woken = asyncio.Event()
        self.open_batches = Counter[Status]()  # in the store, of all gateways, as they were found last
        self.ended = Counter[Status]()  # here
        self._task: asyncio.Task[None] | None = None
        self._draining = False
        self._next_sweep = 0.0

    @property
    def runs(self) -> int:
        return len(self._runs)

    @property
    def lines(self) -> tuple[int, int]:
        """Of the batches that are worked on here: (waiting, running)."""
        runs = [run for run, _ in self._runs.values()]
        return sum(run.lines_waiting for run in runs), sum(run.lines_running for run in runs)

    async def take_over(self) -> None:
        """Write the receipts that a gateway of this name owed when it was killed: before the ledger's own recovery
        takes their calls for lost.
        """
        for batch in await self._shop.store.open_batches():
            if batch.owner == self._shop.owner:
                await Run(self._shop, batch).results.take_over(since=batch.created_at)

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._loop(), name="batches")

    def wake(self) -> None:
        """There is a new batch, or one has been cancelled."""
        self._woken.set()

    def drain(self) -> None:
        """No more lines are begun."""
        self._draining = True
        for run, _ in self._runs.values():
            run.drain()
        self._woken.set()

    async def close(self) -> None:
        """Lines in flight are broken off, to be called again by whoever goes on."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        runs = {batch_id: running for batch_id, (_, running) in self._runs.items()}
        for running in runs.values():
            running.cancel()
        await asyncio.wait([task, *runs.values()])

    async def _loop(self) -> None:
        is_away = False  # the store; in the log it stands once that it is, and that it is back
        while True:
            self._woken.clear()
            try:
                await self._look()
                await self._sweep()
                if is_away:
                    log.warning("the batches are looked after again")
                is_away = False
            except StorageUnavailable as error:
                if not is_away:
                    log.warning("the batches can not be looked after: %s", error.message)
                is_away = True
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _look(self) -> None:
        now, owner = self._shop.clock(), self._shop.owner
        open_batches = await self._shop.store.open_batches()
        self.open_batches = Counter(batch.status for batch in open_batches)
        for batch in open_batches:
            run, task = self._runs.get(batch.id, (None, None))
            if run is None or task is None:
                continue
            if batch.owner != owner:
                task.cancel()
            elif batch.status is Status.CANCELLING:
                run.stop(Status.CANCELLED)
            if batch.leased_until - now < LEASE_SECONDS - EXTEND_SECONDS:
                await self._shop.store.update(batch.id, lambda each: each.extended(owner, now, LEASE_SECONDS))
        if not self._draining:
            await self._claim([batch for batch in open_batches if batch.id not in self._runs], now)

    async def _claim(self, others: list[Batch], now: float) -> None:
        """The oldest first, but tenants take turns: one with many batches does not keep the others waiting."""
        held = Counter(run.batch.tenant for run, _ in self._runs.values())
        while others and len(self._runs) < RUNS_MAX:
            batch = min(others, key=lambda each: (held[each.tenant], each.id))
            others.remove(batch)
            if now < self._not_before.get(batch.id, 0.0):
                continue
            claimed = await self._shop.store.update(
                batch.id, lambda each: each.claimed(self._shop.owner, now, LEASE_SECONDS)
            )
            if claimed is not None:
                held[batch.tenant] += 1
                run = Run(self._shop, claimed)
                self._runs[batch.id] = run, asyncio.create_task(self._live(run), name=f"batch {batch.id}")

    async def _live(self, run: Run) -> None:
        batch_id = run.batch.id
        try:
            await run.live()
            log.info("batch %s is %s", batch_id, run.batch.status.value)
        except* LeaseLost:
            log.warning("batch %s is in other hands", batch_id)
        except* StorageUnavailable as group:
            log.warning("batch %s has to wait: %s", batch_id, group.exceptions[0])
        except* Exception:
            log.exception("batch %s can not be worked on", batch_id)
        finally:
            if run.batch.over:
                self.ended[run.batch.status] += 1
                self._not_before.pop(batch_id, None)
            else:
                self._not_before[batch_id] = self._shop.clock() + RETRY_SECONDS
                with contextlib.suppress(StorageUnavailable):  # its lease runs out then
                    await self._shop.store.update(batch_id, lambda each: each.released(self._shop.owner))
            del self._runs[batch_id]
            self._woken.set()

    async def _sweep(self) -> None:
        """Delete what has been kept long enough, a few at a time."""
        now, store = self._shop.clock(), self._shop.store
        if now < self._next_sweep:
            return
        inputs = {batch.input_file_id for batch in await store.open_batches()}
        expired = [file for file in await store.expired_files(now, SWEPT_AT_ONCE) if file.id not in inputs]
        for file in expired:
            await store.delete_file(file)
        oldest = new_id("batch_", now - self._shop.components.policies.current.batches.keep)
        ended = await store.ended_before(oldest, SWEPT_AT_ONCE)
        for batch in ended:
            await store.forget(batch)
        if not expired and not ended:
            self._next_sweep = now + SWEEP_SECONDS


__all__ = ["BatchWorker"]
