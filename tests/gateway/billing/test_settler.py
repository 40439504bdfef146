"""Reservations are settled concurrently, in one task or in several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gateway.billing.ledger import Ledger
from gateway.billing.settler import MAX_CONCURRENT_SETTLEMENTS, Settler
from gateway.core import supervision
from gateway.core.supervision import Supervisor
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
        async def _settle_each(self, due: Iterator[tuple[Reservation, Usage, int, str]]) -> None:
            nonlocal tasks
            tasks += 1
            await super()._settle_each(due)

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


class FailingLimiter(CountingLimiter):
    """Fails to settle the reservations whose names begin with `bad`."""

    async def end(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        if name.startswith("bad"):
            raise ValueError(name)
        await super().end(name, actual, charges)


async def test_a_settlement_that_fails_stops_no_other_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limiter = FailingLimiter(blocks=False)
    async with Ledger(tmp_path, "replica") as ledger, asyncio.timeout(30):
        settler = Settler(limiter, ledger)
        for batch in range(3):
            ledger.append(a_receipt())
            for number in range(40):
                name = f"{'bad' if number % 2 else 'good'}-{batch}-{number}"
                settler.settle(Reservation(limiter, name, (), {}), Usage(), 0, f"tenant {number % 2}")
            await settler.stop()
        assert (limiter.ended, settler.failed) == (60, 60)
        assert not settler._unsettled, "no call of any tenant waits for a settlement that is over"
    assert "a call of the tenant 'tenant 1' could not be settled" in caplog.text


@pytest.mark.parametrize("pause_seconds", [0.001, 25.0], ids=["restarted", "stopped in the pause"])
async def test_a_failure_of_the_whole_task_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_seconds: float
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", pause_seconds)
    limiter, supervisor = CountingLimiter(blocks=False), Supervisor()

    class FailingSettler(Settler):
        failing = True

        async def _settle_each(self, due: Iterator[tuple[Reservation, Usage, int, str]]) -> None:
            if self.failing:
                self.failing = False
                raise ZeroDivisionError
            await super()._settle_each(due)

    async with Ledger(tmp_path, "replica") as ledger, asyncio.timeout(30):
        settler = FailingSettler(limiter, ledger, supervisor)
        ledger.append(a_receipt())
        settler.settle(Reservation(limiter, "lost", (), {}), Usage(), 0, "acme")
        while not supervisor.failures:
            await ledger.durable(flush_now=True)
            await asyncio.sleep(0.001)
        settler.settle(Reservation(limiter, "settled", (), {}), Usage(), 0, "acme")
        await settler.stop()
        assert limiter.ended == 1 and supervisor.failures == {"ledger settle": 1}
        assert not settler._unsettled
