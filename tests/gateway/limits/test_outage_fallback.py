"""Limits while the storage is unreachable: local shares of them, and what is reported to the storage afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.core.errors import BudgetSpent, LimitReached, StorageUnavailable
from gateway.limits import LIMITS, outage_fallback
from gateway.limits.limiter import Limiter
from gateway.limits.outage_fallback import OutageFallback, share_of
from gateway.policy import StorageOutage
from gateway.storage.base import Charge, Grant, RateCharge, Rejection, SlotCharge, SpendCharge
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.types import Usage
from tests.gateway.calls import a_call, a_policy, chat
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]

NOW = 1_795_132_800.0
MINUTE_SECONDS = 60.0


class Store(MemoryStorage):
    """While `unreachable`, its operations fail. While `answers_lost`, they act, but their answers never arrive."""

    def __init__(self) -> None:
        super().__init__(owner="me")
        self.unreachable = False
        self.answers_lost = False
        self.operations: list[str] = []

    def called(self, what: str) -> None:
        self.operations.append(what)
        if self.unreachable:
            raise StorageUnavailable("timed out")

    def answered(self) -> None:
        if self.answers_lost:
            raise StorageUnavailable("connection lost")

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        self.called("reserve")
        verdict = await super().reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        self.answered()
        return verdict

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        self.called("force_reserve")
        await super().force_reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        self.answered()

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        self.called("settle")
        ended = await super().settle(reservation_id, actual, now=now)
        self.answered()
        return ended

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        self.called("count")
        return 2


class OutageRig:
    def __init__(self, **outage: Any) -> None:
        self.now = NOW
        self.outage = StorageOutage(**({"limits": "local_share"} | outage))
        self.store = Store()
        self.fallback = OutageFallback(self.store, MemoryStorage, lambda: self.outage, clock=lambda: self.now)
        self.number = 0

    async def reserve(self, *charges: Charge) -> str | None:
        """The reservation's id, or None if it was rejected."""
        self.number += 1
        name = f"t/{self.number}"
        verdict = await self.fallback.reserve(name, charges, lease_seconds=30.0, now=self.now)
        return name if isinstance(verdict, Grant) else None

    async def reserve_many(self, times: int, *charges: Charge) -> list[str]:
        return [name for _ in range(times) if (name := await self.reserve(*charges))]

    async def settle(self, name: str, *actual: int) -> None:
        assert await self.fallback.settle(name, actual, now=self.now)

    async def remaining(self, *charges: Charge) -> tuple[int, ...]:
        return await self.store.remaining(charges, now=self.now)


@pytest.fixture
async def rig() -> OutageRig:
    rig = OutageRig()
    await rig.fallback.sync_with_storage()  # the store counts two gateways
    return rig


def rate(amount: int = 1, limit: int = 100) -> RateCharge:
    return RateCharge("t/tokens", amount, limit, MINUTE_SECONDS)


def spend(amount: int, limit: int = 1000) -> SpendCharge:
    return SpendCharge("t/budget/2026-11", amount, limit, 1e6)


SLOT = SlotCharge("t/concurrency", 8)


async def test_a_gateway_grants_its_share_and_no_more(rig: OutageRig) -> None:
    rig.store.unreachable = True
    assert len(await rig.reserve_many(200, rate())) == 50
    assert len(await rig.reserve_many(20, SLOT)) == 4
    assert len(await rig.reserve_many(20, spend(60))) == 8
    assert rig.fallback.in_outage
    assert (rig.fallback.granted_locally, rig.fallback.rejected_locally) == (62, 178)


async def test_only_one_call_tries_the_unreachable_storage(rig: OutageRig) -> None:
    rig.store.unreachable = True
    await rig.reserve_many(20, rate())
    assert rig.store.operations.count("reserve") == 1


async def test_what_was_used_before_the_outage_is_not_granted_again(rig: OutageRig) -> None:
    assert len(await rig.reserve_many(80, rate())) == 80
    await rig.settle(str(await rig.reserve(spend(900))), 900)
    rig.store.unreachable = True
    assert len(await rig.reserve_many(200, rate())) == 10  # its half of the 20 that were left
    assert len(await rig.reserve_many(200, spend(10))) == 5
    rig.now += MINUTE_SECONDS / 2
    assert len(await rig.reserve_many(200, rate())) == 25  # refilled at half of the rate


async def test_the_policy_may_set_the_number_of_gateways(rig: OutageRig) -> None:
    rig.outage = StorageOutage(limits="local_share", replicas=10)
    rig.store.unreachable = True
    assert len(await rig.reserve_many(200, rate())) == 10


async def test_the_policy_may_reject_calls_during_an_outage(rig: OutageRig) -> None:
    rig.outage = StorageOutage(limits="refuse")
    rig.store.unreachable = True
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await rig.reserve(rate())
    assert not rig.fallback.in_outage


@pytest.mark.parametrize(("limit", "replicas"), [(100, 3), (1, 4), (7, 2), (3, 3)])
def test_shares_add_up_to_the_limit_and_its_rate(limit: int, replicas: int) -> None:
    share = share_of(rate(limit=limit), replicas)
    assert isinstance(share, RateCharge)
    assert share.limit == max(1, limit // replicas)
    assert replicas * share.limit / share.period_seconds == pytest.approx(limit / MINUTE_SECONDS)
    assert replicas * share_of(SlotCharge("t/concurrency", limit), replicas).limit <= limit


async def test_a_charge_beyond_the_share_may_be_retried(rig: OutageRig) -> None:
    """80 tokens exceed half of the limit of 100, but may fit after the outage."""
    rig.store.unreachable = True
    verdict = await rig.fallback.reserve("t/a", [rate(80)], lease_seconds=30.0, now=rig.now)
    assert isinstance(verdict, Rejection)
    assert verdict.retry_after_seconds is not None
    verdict = await rig.fallback.reserve("t/b", [rate(101)], lease_seconds=30.0, now=rig.now)
    assert isinstance(verdict, Rejection)
    assert verdict.retry_after_seconds is None


async def test_calls_are_reported_after_the_outage(rig: OutageRig) -> None:
    rig.store.unreachable = True
    names = await rig.reserve_many(3, rate(10), SLOT, spend(100))
    await rig.settle(names[0], 4, 0, 30)
    rig.now += 1
    await rig.settle(names[1], 4, 0, 30)
    await rig.fallback.sync_with_storage()
    was_in_outage = rig.fallback.in_outage
    rig.store.unreachable = False
    await rig.fallback.sync_with_storage()
    assert was_in_outage and not rig.fallback.in_outage
    assert rig.fallback.unreported == 0
    assert await rig.remaining(rate(), SLOT, spend(0)) == (100 - 4 - 4 - 10, 7, 1000 - 30 - 30 - 100)
    await rig.settle(names[2], 4, 0, 30)  # began during the outage, and is settled in the storage
    assert await rig.remaining(rate(), SLOT, spend(0)) == (100 - 4 - 4 - 4, 8, 1000 - 90)


async def test_rates_that_have_refilled_are_not_reported(rig: OutageRig) -> None:
    rig.store.unreachable = True
    await rig.reserve(SLOT)  # the storage may hold its reservation, since its answer was lost
    await rig.settle(str(await rig.reserve(rate(10), spend(100))), 10, 30)
    rig.now += MINUTE_SECONDS
    rig.store.unreachable = False
    await rig.fallback.sync_with_storage()
    assert await rig.remaining(rate(), spend(0)) == (100, 970)


@pytest.mark.parametrize("fits", [True, False])
async def test_a_reservation_whose_answer_was_lost_is_not_held_twice(rig: OutageRig, fits: bool) -> None:
    rig.store.answers_lost = True
    operations = (rate(10), spend(100)) if fits else (rate(10), spend(900))
    name = await rig.reserve(*operations)
    assert (name is not None) == fits  # the share of the budget is 500
    if name is not None:
        await rig.settle(name, 5, 50)
    rig.now += 2 * MINUTE_SECONDS
    rig.store.answers_lost = False
    await rig.fallback.sync_with_storage()
    assert rig.fallback.unreported == 0
    assert await rig.remaining(rate(), spend(0)) == ((100, 950) if fits else (100, 1000))


async def test_a_call_that_ends_after_its_report_lost_its_answer_is_settled_as_it_was_reported(rig: OutageRig) -> None:
    rig.store.unreachable = True
    await rig.reserve(spend(0))  # begins the outage
    name = str(await rig.reserve(rate(10), SLOT, spend(100)))
    rig.store.unreachable, rig.store.answers_lost = False, True
    await rig.fallback.sync_with_storage()  # the storage has all charges of the call, which still runs
    await rig.settle(name, 5, 0, 50)  # an ended call that is reported now needs no slot
    rig.store.answers_lost = False
    await rig.fallback.sync_with_storage()
    assert not rig.fallback.in_outage and rig.fallback.unreported == 0
    assert await rig.remaining(rate(), SLOT, spend(0)) == (95, SLOT.limit, 950)


async def test_a_call_that_cannot_be_reported_holds_up_no_other_one(
    rig: OutageRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store.unreachable = True
    bad, *others = await rig.reserve_many(3, spend(10))
    for name in (bad, *others):
        await rig.settle(name, 7)
    settle = Store.settle

    async def fail_once(self: Store, name: str, actual: Sequence[int], *, now: float) -> bool:
        if name == bad:
            raise ValueError("another number of charges")
        return await settle(self, name, actual, now=now)

    monkeypatch.setattr(Store, "settle", fail_once)
    rig.store.unreachable = False
    await rig.fallback.sync_with_storage()
    assert not rig.fallback.in_outage and rig.fallback.unreported == 0
    assert await rig.remaining(spend(0)) == (1000 - 7 - 7 - 10,)  # the bad one is held until its lease ends
    assert f"limits may lack the usage of {bad}" in caplog.text


@pytest.mark.parametrize("operation", ["force_reserve", "settle"])
async def test_nothing_is_reported_twice(rig: OutageRig, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store.unreachable = True
    for name in await rig.reserve_many(3, spend(10)):
        await rig.settle(name, 7)
    rig.store.unreachable = False
    monkeypatch.setattr(rig.store, "answered", lambda: rig.store.called(operation))
    act, acted = getattr(MemoryStorage, operation), []

    async def lose_first_answer(self: Store, name: str, *given: Any, **named: Any) -> Any:
        answered = await act(self, name, *given, **named)
        if name not in acted:
            acted.append(name)
            raise StorageUnavailable("connection lost")
        return answered

    monkeypatch.setattr(Store, operation, lose_first_answer)
    for _ in range(6):
        await rig.fallback.sync_with_storage()
    assert rig.fallback.unreported == 0
    assert len(acted) == 3
    assert await rig.remaining(spend(0)) == (1000 - 21,)


async def test_unreported_calls_are_bounded(rig: OutageRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage_fallback, "MAX_UNREPORTED", 3)
    rig.store.unreachable = True
    assert len(await rig.reserve_many(3, rate())) == 3
    with pytest.raises(StorageUnavailable, match="3 calls are unreported already"):
        await rig.reserve(rate())


async def test_calls_admitted_before_the_outage_are_settled_after_it(rig: OutageRig) -> None:
    limiter = Limiter(rig.fallback, LIMITS, clock=lambda: rig.now)
    limits = {"budget": {"amount": "0.000001"}, "concurrency": 2}

    def a_new_call() -> Any:
        return a_call(policy=a_policy(tenants=[{"name": "t", "limits": limits}]))

    before = await limiter.admit(a_new_call())
    rig.store.unreachable = True
    during = await limiter.admit(a_new_call())
    with pytest.raises(LimitReached):
        await limiter.admit(a_new_call())
    await before.settle(Usage(), 400)
    await during.release_slot()
    await during.settle(Usage(), 500)
    assert limiter.unsettled == 1
    rig.store.unreachable = False
    await rig.fallback.sync_with_storage()
    await limiter.retry_unsettled()
    assert limiter.unsettled == 0
    budget = SpendCharge("t/budget/2026-11", 0, 1000, 1e6)
    assert await rig.remaining(SlotCharge("t/concurrency", 2), budget) == (2, 100)


async def test_the_background_task_ends_the_outage(rig: OutageRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage_fallback, "RETRY_SECONDS", 0.001)
    await rig.fallback.start()
    rig.store.unreachable = True
    await rig.settle(str(await rig.reserve(spend(10))), 10)
    rig.store.unreachable = False
    async with asyncio.timeout(10):
        while rig.fallback.in_outage or rig.fallback.unreported:
            await asyncio.sleep(0)
    await rig.fallback.stop()
    assert await rig.remaining(spend(0)) == (990,)


class Replica:
    """One gateway's limits on a real Redis."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self.storage = RedisStorage(server.url, owner=name)
        self.fallback = OutageFallback(self.storage, MemoryStorage, lambda: StorageOutage(limits="local_share"))
        self.limiter = Limiter(self.fallback, LIMITS)

    async def open(self) -> None:
        await self.storage.open()
        await self.fallback.sync_with_storage()

    async def spend(self, calls: int) -> int:
        """Make calls that each cost 1 nano of a budget of 100. Returns how many were admitted."""
        granted = 0
        price = {"input": "0", "output": "0.001"}  # one nano per token
        deployments = [{"name": "a", "base_url": "http://a.invalid/v1", "model": "served", "price": price}]
        limits = {"budget": {"amount": "0.0000001"}, "concurrency": 50}
        models = [{"name": "m", "deployments": ["a"]}]
        policy = a_policy(deployments=deployments, models=models, tenants=[{"name": "t", "limits": limits}])
        for _ in range(calls):
            try:
                reservation = await self.limiter.admit(a_call(chat(max_tokens=1), policy))
            except (LimitReached, BudgetSpent):
                continue
            granted += 1
            await reservation.release_slot()
            await reservation.settle(Usage(), 1)
        return granted


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_two_replicas_share_a_budget_during_an_outage_of_redis(own_redis_server: RedisServer, how: str) -> None:
    with own_redis_server.client() as client:
        client.config_set("appendfsync", "always")  # else a killed Redis may forget its last two seconds
    one, two = Replica(own_redis_server, "one"), Replica(own_redis_server, "two")
    await one.open()
    await two.open()
    await one.fallback.sync_with_storage()
    assert (one.fallback.replicas, two.fallback.replicas) == (2, 2)
    assert await one.spend(20) + await two.spend(20) == 40
    if how == "frozen":
        own_redis_server.freeze()
    else:
        own_redis_server.stop()
    try:
        granted = await one.spend(20) + await two.spend(20)  # 60 are left; one gateway last learned of 80
        assert granted == 40
        assert one.fallback.in_outage and two.fallback.in_outage
    finally:
        if how == "frozen":
            own_redis_server.thaw()
        else:
            own_redis_server.start()
    for replica in (one, two):
        async with asyncio.timeout(20):
            while replica.fallback.in_outage or replica.fallback.unreported or replica.limiter.unsettled:
                await replica.fallback.sync_with_storage()
                await replica.limiter.retry_unsettled()
    (left,) = await one.fallback.remaining([SpendCharge(_account(), 0, 100, 1e6)], now=0.0)
    assert left == 100 - 40 - granted
    assert await one.spend(100) + await two.spend(100) == left
    for replica in (one, two):
        await replica.storage.close()


def _account() -> str:
    return f"t/budget/{datetime.now(UTC):%Y-%m}"
