"""Slices: what a gateway leases, counts down, reports and returns. `test_slices_histories.py` has random histories."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.core.errors import LedgerUnavailable, StorageUnavailable
from gateway.core.ids import new_event_id
from gateway.limits.slices import Slices
from gateway.limits.tenant_slices import CALLS_MIN, LEASE_SECONDS
from gateway.storage.base import Charge, Grant, RateCharge, Rejection, SlotCharge, SpendCharge
from gateway.storage.memory import MemoryStorage

START = 1_800_000_000.0
LIMIT = 1000


class CountingStorage(MemoryStorage):
    """Counts the operations, and fails or waits on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.fails = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def reserve(self, *given: Any, **named: Any) -> Grant | Rejection:
        self.operations.append("reserve")
        return await super().reserve(*given, **named)

    async def report_slices(self, *given: Any, **named: Any) -> Any:
        self.operations.append("report")
        await self.gate.wait()
        if self.fails:
            raise StorageUnavailable("timed out")
        return await super().report_slices(*given, **named)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def storage() -> CountingStorage:
    return CountingStorage()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def gateway(storage: MemoryStorage, clock: Clock, owner: str = "a", **options: Any) -> Slices:
    slices = Slices(storage, owner, clock=clock, monotonic=clock, **options)
    slices.begin_leasing()
    return slices


def rate(amount: int = 10, limit: int = LIMIT) -> RateCharge:
    return RateCharge("t/tokens", amount, limit, 100.0)


def slot(limit: int = LIMIT) -> SlotCharge:
    return SlotCharge("t/concurrency", limit)


def money(amount: int = 10, limit: int = LIMIT) -> SpendCharge:
    return SpendCharge("t/budget/total", amount, limit, 1e9)


async def admit(slices: Slices, clock: Clock, name: str, *charges: Charge) -> Grant | Rejection:
    """As the limiter does."""
    grant = slices.take(f"t/{name}", charges) or await slices.lease(f"t/{name}", charges)
    return grant or await slices.reserve(f"t/{name}", charges, lease_seconds=30.0, now=clock.now)


async def left(storage: MemoryStorage, clock: Clock, *charges: Charge) -> tuple[int, ...]:
    return await storage.remaining(charges, now=clock.now)


async def test_a_thousand_calls_begun_together_need_one_operation(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    charges = (rate(1, 100_000), slot(100_000), money(1, 100_000))
    verdicts = await asyncio.gather(*(admit(slices, clock, str(number), *charges) for number in range(1000)))
    assert all(isinstance(verdict, Grant) and verdict.leased for verdict in verdicts)
    assert storage.operations == ["report"]


async def test_later_calls_need_no_operation(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "first", rate(), slot(), money())
    for number in range(5):
        assert slices.take(f"t/{number}", (rate(), slot(), money())) is not None
        assert slices.bill(f"t/{number}", [10, 0, 10], new_event_id())
        await slices.settle(f"t/{number}", [10, 0, 10], now=clock.now)
    assert storage.operations == ["report"]


async def test_what_a_call_did_not_use_is_refunded_to_the_last_unit(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "early", rate(40), money(40))
    await admit(slices, clock, "late", rate(40), money(40))
    assert slices.bill("t/early", [15, 15], new_event_id())  # before its use is reported
    await slices.report_all()
    assert slices.bill("t/late", [5, 5], new_event_id())  # afterwards
    clock.now += 2.0
    await slices.report_all()
    clock.now += 2.0
    await slices.report_all()
    # As if the calls had taken 15 and 5 only, which have leaked for four seconds: nothing is left of them.
    assert await left(storage, clock, rate(), money()) == (LIMIT, LIMIT - 20)


async def test_more_than_reserved_counts_as_well(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "one", rate(10), money(10))
    slices.bill("t/one", [700, 700], new_event_id())
    await slices.report_all()
    clock.now += 2.0
    await slices.report_all()
    assert await left(storage, clock, rate(), money()) == (LIMIT - 700 + 20, LIMIT - 700)


async def test_a_small_limit_is_reserved_one_by_one(storage: CountingStorage, clock: Clock) -> None:
    charges = (slot(CALLS_MIN),)
    one, two = (gateway(storage, clock, owner, replicas=lambda: 2) for owner in ("one", "two"))
    for number in range(CALLS_MIN // 2):
        assert isinstance(await admit(one, clock, f"one{number}", *charges), Grant)
        assert isinstance(await admit(two, clock, f"two{number}", *charges), Grant)
    assert isinstance(await admit(one, clock, "more", *charges), Rejection)
    assert storage.operations.count("reserve") >= CALLS_MIN - 2


async def test_a_gateway_returns_its_own_slice_before_a_rejection(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "one", money(1))  # leases more than it uses
    grant = await admit(slices, clock, "all", money(LIMIT - 1))
    assert isinstance(grant, Grant)
    assert isinstance(await admit(slices, clock, "more", money(1)), Rejection)


async def test_a_rejection_says_when_a_used_rate_has_room_again(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    hourly = RateCharge("t/requests", 1, 1, 3600.0)
    assert isinstance(await admit(slices, clock, "t/1", hourly), Grant)
    refused = await admit(slices, clock, "t/2", hourly)
    assert isinstance(refused, Rejection)
    assert refused.retry_after_seconds == pytest.approx(3600.0, abs=1.0)


async def test_an_idle_slice_is_returned(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "one", slot())
    await slices.settle("t/one", [0], now=clock.now)
    clock.now += 1.5
    await slices.report_all()
    everything = SpendCharge("t/x", 0, 1, 1e9)
    del everything
    held = [await storage.reserve(f"t/{n}", [slot()], lease_seconds=9.0, now=clock.now) for n in range(LIMIT)]
    assert all(isinstance(each, Grant) for each in held)


async def test_the_slices_of_a_killed_gateway_end_within_seconds(storage: CountingStorage, clock: Clock) -> None:
    await admit(gateway(storage, clock), clock, "one", slot(), money())
    assert isinstance(await storage.reserve("t/x", [money(LIMIT)], lease_seconds=9.0, now=clock.now), Rejection)
    clock.now += LEASE_SECONDS
    assert isinstance(await storage.reserve("t/x", [money(LIMIT)], lease_seconds=9.0, now=clock.now), Grant)


async def test_the_slice_of_a_rate_counts_as_used_if_its_gateway_was_killed(
    storage: CountingStorage, clock: Clock
) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "one", rate(10))
    while slices.take("t/more", [rate(10)]) is not None:  # not reported
        await slices.settle("t/more", [10], now=clock.now)
    clock.now += LEASE_SECONDS
    assert isinstance(await storage.reserve("t/x", [rate(LIMIT)], lease_seconds=9.0, now=clock.now), Rejection)


async def test_a_new_process_takes_over_and_counts_the_old_slice_of_a_rate_as_used(
    storage: CountingStorage, clock: Clock
) -> None:
    await admit(gateway(storage, clock), clock, "one", rate(10))
    await admit(gateway(storage, clock), clock, "two", rate(10))
    (remaining,) = await left(storage, clock, rate())
    assert remaining <= LIMIT - 16 * 10


async def test_a_changed_limit_ends_the_slice(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "one", money(10))
    assert slices.take("t/two", [money(10, limit=20)]) is None
    assert isinstance(await admit(slices, clock, "two", money(10, limit=20)), Grant)
    assert isinstance(await admit(slices, clock, "three", money(10, limit=20)), Rejection)


async def test_slices_admit_calls_in_an_outage_until_their_lease_ends(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await admit(slices, clock, "one", money())
    storage.fails = True
    clock.now += 1.0
    assert slices.take("t/two", [money()]) is not None
    clock.now += LEASE_SECONDS - 1.0
    assert slices.take("t/three", [money()]) is None
    with pytest.raises(StorageUnavailable):
        await slices.lease("t/three", [money()])
    slices.bill("t/one", [10], new_event_id())
    slices.bill("t/two", [7], new_event_id())
    await slices.report_all()
    storage.fails = False
    for _ in range(3):
        clock.now += 2.0
        await slices.report_all()
    assert await left(storage, clock, money()) == (LIMIT - 17,)


async def test_costs_wait_until_their_receipts_are_durable(storage: CountingStorage, clock: Clock) -> None:
    is_durable = False

    async def durable() -> None:
        if not is_durable:
            raise LedgerUnavailable("the disk is full")

    slices = gateway(storage, clock, durable=durable)
    await admit(slices, clock, "one", money())
    slices.bill("t/one", [10], receipt := new_event_id())
    await slices.report_all()
    assert await storage.settled_receipt("t", "a") != receipt
    is_durable = True
    await slices.report_all()
    assert await storage.settled_receipt("t", "a") == receipt


async def test_no_slices_are_leased_before_crash_recovery_is_done(storage: CountingStorage, clock: Clock) -> None:
    slices = Slices(storage, "a", clock=clock, monotonic=clock)
    assert await admit(slices, clock, "one", money()) == Grant((LIMIT - 10,))
    assert storage.operations == ["reserve"]


async def test_a_cancelled_call_keeps_nothing(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    storage.gate.clear()
    calls = [asyncio.create_task(admit(slices, clock, str(number), slot())) for number in range(2)]
    await asyncio.sleep(0)
    calls[0].cancel()
    storage.gate.set()
    assert isinstance(await calls[1], Grant)
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    assert slices.call_count == 1


async def test_stopping_returns_everything(storage: CountingStorage, clock: Clock) -> None:
    slices = gateway(storage, clock)
    await slices.start()
    await admit(slices, clock, "one", slot(), money())
    slices.bill("t/one", [0, 4], new_event_id())
    await slices.settle("t/one", [0, 0], now=clock.now)
    await slices.stop()
    assert isinstance(await storage.reserve("t/x", [money(LIMIT - 4)], lease_seconds=9.0, now=clock.now), Grant)
