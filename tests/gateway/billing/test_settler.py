"""Reservations are settled concurrently, in one task or in several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway.billing.ledger import Ledger
from gateway.billing.settler import MAX_CONCURRENT_SETTLEMENTS, Settler
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter, Reservation
from gateway.storage.base import Charge
from gateway.storage.memory import MemoryStorage
from gateway.types import Usage
from tests.gateway.billing.ledger.receipts import a_receipt


class CountingLimiter(Limiter):
    """Counts the settlements. `blocks`: each waits until as many as allowed are in flight, as with a remote storage."""

    def __init__(self, *, blocks: bool) -> None:
        super().__init__(MemoryStorage(), LIMITS)
        self.ended = self.most_concurrent = self._concurrent = 0
        self._full = asyncio.Event()
        if not blocks:
            self._full.set()

    async def end(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        self.ended += 1
        self._concurrent += 1
        self.most_concurrent = max(self.most_concurrent, self._concurrent)
        if self._concurrent == MAX_CONCURRENT_SETTLEMENTS:
            self._full.set()
        await self._full.wait()
        self._concurrent -= 1


async def settle_and_count_tasks(directory: Path, limiter: CountingLimiter, reservations: int) -> int:
    tasks = 0

    class CountingSettler(Settler):
        @staticmethod
        async def _settle_each(due: Iterator[tuple[Reservation, Usage, int, str]]) -> None:
            nonlocal tasks
            tasks += 1
            await Settler._settle_each(due)

    async with Ledger(directory, "replica") as ledger, asyncio.timeout(30):
        settler = CountingSettler(limiter, ledger)
        ledger.append(a_receipt())
        for number in range(reservations):
            settler.settle(Reservation(limiter, f"r{number}", (), {}), Usage(), 0, "acme")
        await settler.stop()
    return tasks


async def test_settlements_in_a_remote_storage_run_concurrently_up_to_the_bound(tmp_path: Path) -> None:
    limiter = CountingLimiter(blocks=True)
    assert await settle_and_count_tasks(tmp_path, limiter, 3 * MAX_CONCURRENT_SETTLEMENTS) == MAX_CONCURRENT_SETTLEMENTS
    assert (limiter.ended, limiter.most_concurrent) == (3 * MAX_CONCURRENT_SETTLEMENTS, MAX_CONCURRENT_SETTLEMENTS)


async def test_settlements_in_memory_run_in_one_task(tmp_path: Path) -> None:
    limiter = CountingLimiter(blocks=False)
    assert await settle_and_count_tasks(tmp_path, limiter, 3 * MAX_CONCURRENT_SETTLEMENTS) == 1
    assert limiter.ended == 3 * MAX_CONCURRENT_SETTLEMENTS
