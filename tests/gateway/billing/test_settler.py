"""How reservations are settled once their calls are over."""

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


class Ends(Limiter):
    """Counts. `waits`: as for a storage behind a socket, until as many wait as may."""

    def __init__(self, *, waits: bool) -> None:
        super().__init__(MemoryStorage(), LIMITS)
        self.ended = self.most_at_once = self._at_once = 0
        self._full = asyncio.Event()
        if not waits:
            self._full.set()

    async def end(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        self.ended += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        if self._at_once == MAX_CONCURRENT_SETTLEMENTS:
            self._full.set()
        await self._full.wait()
        self._at_once -= 1


async def tasks_that_settle(directory: Path, limiter: Ends, reservations: int) -> int:
    tasks = 0

    class Counted(Settler):
        @staticmethod
        async def _settle_each(due: Iterator[tuple[Reservation, Usage, int, str]]) -> None:
            nonlocal tasks
            tasks += 1
            await Settler._settle_each(due)

    async with Ledger(directory, "replica") as ledger, asyncio.timeout(30):
        settler = Counted(limiter, ledger)
        ledger.append(a_receipt())
        for number in range(reservations):
            settler.settle(Reservation(limiter, f"r{number}", (), {}), Usage(), 0, "acme")
        await settler.stop()
    return tasks


async def test_as_many_are_settled_at_once_as_a_storage_may_be_asked(tmp_path: Path) -> None:
    limiter = Ends(waits=True)
    assert await tasks_that_settle(tmp_path, limiter, 3 * MAX_CONCURRENT_SETTLEMENTS) == MAX_CONCURRENT_SETTLEMENTS
    assert (limiter.ended, limiter.most_at_once) == (3 * MAX_CONCURRENT_SETTLEMENTS, MAX_CONCURRENT_SETTLEMENTS)


async def test_a_storage_that_nobody_waits_for_is_asked_by_one_task(tmp_path: Path) -> None:
    limiter = Ends(waits=False)
    assert await tasks_that_settle(tmp_path, limiter, 3 * MAX_CONCURRENT_SETTLEMENTS) == 1
    assert limiter.ended == 3 * MAX_CONCURRENT_SETTLEMENTS
