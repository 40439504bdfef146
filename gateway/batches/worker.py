"""Decides which batches this gateway runs: it claims unowned ones, extends its leases, and releases them.

Several gateways on one store share the work batch by batch. A lease ends `LEASE_SECONDS` after its owner was killed, or
at once if a gateway with the same replica name starts. The gateways' clocks must agree within a few seconds. Otherwise
lines may be computed twice, but only the owner can write results.

One task polls the store every `POLL_SECONDS`, and at once after `wake`. The task also deletes files and batches whose
retention time has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter

from gateway.batches.records import Batch, BatchStatus, new_id
from gateway.batches.run import BatchRun
from gateway.batches.runtime import BatchRuntime, LeaseLost
from gateway.core.errors import StorageUnavailable
from gateway.core.supervision import SupervisedTask, Supervisor

LEASE_SECONDS = 10.0
EXTEND_SECONDS = LEASE_SECONDS / 3
POLL_SECONDS = 1.0  # longest delay until another gateway's change of a batch is noticed
RUNS_MAX = 8  # batches that one gateway runs at the same time; beyond, one for each tenant that has none
TENANT_RUNS_MAX = 64  # batches that it runs at the same time at all
RETRY_SECONDS = 10.0  # pause after a failed run
SWEEP_SECONDS = 600.0
SWEEP_PAGE = 100  # most files and most batches that one sweep deletes

log = logging.getLogger(__name__)


class BatchWorker:
    """Runs batches in the background. The application calls `start` and `close`."""

    def __init__(self, runtime: BatchRuntime, supervisor: Supervisor | None = None) -> None:
        self._runtime = runtime
        self._supervisor = supervisor or Supervisor()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._not_before: dict[str, float] = {}  # by batch id: time from which a failed run may be retried
        self._woken = asyncio.Event()
        self.open_batches = Counter[BatchStatus]()  # batches of all gateways in the store at the last poll
        self.ended = Counter[BatchStatus]()  # batches that this gateway has ended since its start
        self._task: SupervisedTask | None = None
        self._draining = False
        self._next_sweep = 0.0

    @property
    def runs(self) -> int:
        """Number of batches that this gateway runs now."""
        return len(self._runs)

    @property
    def lines(self) -> tuple[int, int]:
        """Return the numbers of (waiting, in-flight) lines in the batches that this gateway runs."""
        runs = [run for run, _ in self._runs.values()]
        return sum(run.lines_waiting for run in runs), sum(run.lines_running for run in runs)

    async def recover(self) -> None:
        """Write the receipts that a killed gateway with this replica name had not written to the ledger.

        Must be awaited before the ledger's own recovery, which would treat the calls of these receipts as lost.
        """
        for batch in await self._runtime.store.open_batches():
            if batch.owner == self._runtime.owner:
                await BatchRun(self._runtime, batch).results.recover(since=batch.created_at)

    def start(self) -> None:
        if self._task is None:
            self._task = self._supervisor.start("batches", self._loop)

    def wake(self) -> None:
        """Poll the store now, because a batch was created or cancelled."""
        self._woken.set()

    def drain(self) -> None:
        """Let the lines in flight finish, and start no other lines."""
        self._draining = True
        for run, _ in self._runs.values():
            run.drain()
        self._woken.set()

    async def close(self) -> None:
        """Cancel the lines in flight. The next owner of each batch calls these lines a second time."""
        task, self._task = self._task, None
        if task is None:
            return
        await task.cancel()
        runs = [running for _, running in self._runs.values()]
        for running in runs:
            running.cancel()
        if runs:
            await asyncio.wait(runs)

    async def _loop(self) -> None:
        is_away = False  # whether the store is unavailable; only changes are logged
        while True:
            self._woken.clear()
            try:
                await self._poll()
                await self._sweep()
                if is_away:
                    log.warning("batch storage is available again")
                is_away = False
            except StorageUnavailable as error:
                if not is_away:
                    log.warning("batch storage is unavailable, batches are paused: %s", error.message)
                is_away = True
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _poll(self) -> None:
        """Compare the store's open batches with this gateway's runs. Stops runs, extends leases and claims batches."""
        now, owner = self._runtime.clock(), self._runtime.owner
        open_batches = await self._runtime.store.open_batches()
        self.open_batches = Counter(batch.status for batch in open_batches)
        for batch in open_batches:
            run, task = self._runs.get(batch.id, (None, None))
            if run is None or task is None:
                continue
            if batch.owner != owner:
                task.cancel()
            elif batch.status is BatchStatus.CANCELLING:
                run.stop(BatchStatus.CANCELLED)
            if batch.leased_until - now < LEASE_SECONDS - EXTEND_SECONDS:
                await self._runtime.store.update(batch.id, lambda each: each.extended(owner, now, LEASE_SECONDS))
        if not self._draining:
            await self._claim([batch for batch in open_batches if batch.id not in self._runs], now)

    async def _claim(self, others: list[Batch], now: float) -> None:
        """Claim batches and run them, oldest first, alternating between tenants.

        A tenant without a run gets one even if others hold `RUNS_MAX`, since lines take turns by tenant (`FairSlots`).
        """
        running = Counter(run.batch.tenant for run, _ in self._runs.values())
        while others and len(self._runs) < TENANT_RUNS_MAX:
            batch = min(others, key=lambda each: (running[each.tenant], each.id))
            if len(self._runs) >= RUNS_MAX and running[batch.tenant]:
                return
            others.remove(batch)
            if now < self._not_before.get(batch.id, 0.0):
                continue
            claimed = await self._runtime.store.update(
                batch.id, lambda each: each.claimed(self._runtime.owner, now, LEASE_SECONDS)
            )
            if claimed is not None:
                running[batch.tenant] += 1
                run = BatchRun(self._runtime, claimed)
                self._runs[batch.id] = run, asyncio.create_task(self._run_batch(run), name=f"batch {batch.id}")

    async def _run_batch(self, run: BatchRun) -> None:
        """Run a batch, log how it ended, and release its lease if it has not ended."""
        batch_id = run.batch.id
        try:
            await run.run()
            log.info("batch %s: %s", batch_id, run.batch.status.value)
        except* LeaseLost:
            log.warning("batch %s: another gateway has taken it over", batch_id)
        except* StorageUnavailable as group:
            log.warning("batch %s: paused, batch storage is unavailable: %s", batch_id, group.exceptions[0])
        except* Exception:
            log.exception("batch %s: the run failed and will be retried in %g s", batch_id, RETRY_SECONDS)
        finally:
            if run.batch.has_ended:
                self.ended[run.batch.status] += 1
                self._not_before.pop(batch_id, None)
            else:
                self._not_before[batch_id] = self._runtime.clock() + RETRY_SECONDS
                with contextlib.suppress(StorageUnavailable):  # without a release, the lease expires
                    await self._runtime.store.update(batch_id, lambda each: each.released(self._runtime.owner))
            del self._runs[batch_id]
            self._woken.set()

    async def _sweep(self) -> None:
        """Delete one page of expired files, and one page of batches older than `batches.keep`.

        The input files of open batches are not deleted. If anything was deleted, the next poll sweeps again. Otherwise
        the next sweep is `SWEEP_SECONDS` later.
        """
        now, store = self._runtime.clock(), self._runtime.store
        if now < self._next_sweep:
            return
        inputs = {batch.input_file_id for batch in await store.open_batches()}
        expired = [file for file in await store.expired_files(now, SWEEP_PAGE) if file.id not in inputs]
        for file in expired:
            await store.delete_file(file)
        oldest = new_id("batch_", now - self._runtime.components.policies.current.batches.keep)
        ended = await store.ended_before(oldest, SWEEP_PAGE)
        for batch in ended:
            await store.delete_batch(batch)
        if not expired and not ended:
            self._next_sweep = now + SWEEP_SECONDS


__all__ = ["BatchWorker"]
