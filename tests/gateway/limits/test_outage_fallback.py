"""Limits while the storage is away: shares of them, and what the storage is told afterwards."""

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
    """While `away` it does nothing; while `deaf` it acts, and nobody hears of it."""

    def __init__(self) -> None:
        super().__init__(owner="me")
        self.away = False
        self.deaf = False
        self.asked: list[str] = []

    def meet(self, what: str) -> None:
        self.asked.append(what)
        if self.away:
            raise StorageUnavailable("away")

    def answer(self) -> None:
        if self.deaf:
            raise StorageUnavailable("not heard")

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        self.meet("reserve")
        verdict = await super().reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        self.answer()
        return verdict

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        self.meet("force_reserve")
        await super().force_reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        self.answer()

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        self.meet("settle")
        ended = await super().settle(reservation_id, actual, now=now)
        self.answer()
        return ended

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        self.meet("count")
        return 2


class Components:
    def __init__(self, **outage: Any) -> None:
        self.now = NOW
        self.outage = StorageOutage(**({"limits": "local_share"} | outage))
        self.store = Store()
        self.shared = OutageFallback(self.store, MemoryStorage, lambda: self.outage, clock=lambda: self.now)
        self.number = 0

    async def ask(self, *charges: Charge) -> str | None:
        """The reservation's name, or None for a refusal."""
        self.number += 1
        name = f"t/{self.number}"
        verdict = await self.shared.reserve(name, charges, lease_seconds=30.0, now=self.now)
        return name if isinstance(verdict, Grant) else None

    async def many(self, times: int, *charges: Charge) -> list[str]:
        return [name for _ in range(times) if (name := await self.ask(*charges))]

    async def settle(self, name: str, *actual: int) -> None:
        assert await self.shared.settle(name, actual, now=self.now)

    async def remaining(self, *charges: Charge) -> tuple[int, ...]:
        return await self.store.remaining(charges, now=self.now)


@pytest.fixture
async def components() -> Components:
    components = Components()
    await components.shared.sync_with_storage()  # and so knows that there are two
    return components


def rate(amount: int = 1, limit: int = 100) -> RateCharge:
    return RateCharge("t/tokens", amount, limit, MINUTE_SECONDS)


def money(amount: int, limit: int = 1000) -> SpendCharge:
    return SpendCharge("t/budget/2026-11", amount, limit, 1e6)


PLACE = SlotCharge("t/concurrency", 8)


async def test_each_grants_its_share_and_no_more(components: Components) -> None:
    components.store.away = True
    assert len(await components.many(200, rate())) == 50
    assert len(await components.many(20, PLACE)) == 4
    assert len(await components.many(20, money(60))) == 8
    assert components.shared.in_outage
    assert (components.shared.granted_locally, components.shared.rejected_locally) == (62, 178)


async def test_only_one_call_finds_out(components: Components) -> None:
    components.store.away = True
    await components.many(20, rate())
    assert components.store.asked.count("reserve") == 1


async def test_what_had_been_used_before_is_not_granted_again(components: Components) -> None:
    assert len(await components.many(80, rate())) == 80
    await components.settle(str(await components.ask(money(900))), 900)
    components.store.away = True
    assert len(await components.many(200, rate())) == 10  # its half of the 20 that were left
    assert len(await components.many(200, money(10))) == 5
    components.now += MINUTE_SECONDS / 2
    assert len(await components.many(200, rate())) == 25  # at half of the rate


async def test_the_policy_may_say_among_how_many(components: Components) -> None:
    components.outage = StorageOutage(limits="local_share", replicas=10)
    components.store.away = True
    assert len(await components.many(200, rate())) == 10


async def test_the_policy_may_refuse(components: Components) -> None:
    components.outage = StorageOutage(limits="refuse")
    components.store.away = True
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await components.ask(rate())
    assert not components.shared.in_outage


@pytest.mark.parametrize(("limit", "replicas"), [(100, 3), (1, 4), (7, 2), (3, 3)])
def test_shares_add_up_to_the_limit_and_its_rate(limit: int, replicas: int) -> None:
    share = share_of(rate(limit=limit), replicas)
    assert isinstance(share, RateCharge)
    assert share.limit == max(1, limit // replicas)
    assert replicas * share.limit / share.period_seconds == pytest.approx(limit / MINUTE_SECONDS)
    assert replicas * share_of(SlotCharge("t/concurrency", limit), replicas).limit <= limit


async def test_a_share_s_refusal_is_one_to_come_back_from(components: Components) -> None:
    """80 tokens of 100 are more than half of them: that is no reason to say that it will never fit."""
    components.store.away = True
    verdict = await components.shared.reserve("t/a", [rate(80)], lease_seconds=30.0, now=components.now)
    assert isinstance(verdict, Rejection)
    assert verdict.retry_after_seconds is not None
    verdict = await components.shared.reserve("t/b", [rate(101)], lease_seconds=30.0, now=components.now)
    assert isinstance(verdict, Rejection)
    assert verdict.retry_after_seconds is None


async def test_the_storage_is_told_of_what_was_used(components: Components) -> None:
    components.store.away = True
    names = await components.many(3, rate(10), PLACE, money(100))
    await components.settle(names[0], 4, 0, 30)
    components.now += 1
    await components.settle(names[1], 4, 0, 30)
    await components.shared.sync_with_storage()
    assert components.shared.in_outage
    components.store.away = False
    await components.shared.sync_with_storage()
    assert not components.shared.in_outage
    assert components.shared.unreported == 0
    assert await components.remaining(rate(), PLACE, money(0)) == (100 - 4 - 4 - 10, 7, 1000 - 30 - 30 - 100)
    await components.settle(names[2], 4, 0, 30)  # it began in the outage, and ends in the storage
    assert await components.remaining(rate(), PLACE, money(0)) == (100 - 4 - 4 - 4, 8, 1000 - 90)


async def test_rates_that_have_refilled_since_are_not_told(components: Components) -> None:
    components.store.away = True
    await components.ask(PLACE)  # whose own reservation the storage may hold unheard
    await components.settle(str(await components.ask(rate(10), money(100))), 10, 30)
    components.now += MINUTE_SECONDS
    components.store.away = False
    await components.shared.sync_with_storage()
    assert await components.remaining(rate(), money(0)) == (100, 970)


@pytest.mark.parametrize("fits", [True, False])
async def test_what_was_reserved_unheard_is_not_held_twice(components: Components, fits: bool) -> None:
    components.store.deaf = True
    asked = (rate(10), money(100)) if fits else (rate(10), money(900))
    name = await components.ask(*asked)
    assert (name is not None) == fits  # half of the money is 500
    if name is not None:
        await components.settle(name, 5, 50)
    components.now += 2 * MINUTE_SECONDS
    components.store.deaf = False
    await components.shared.sync_with_storage()
    assert components.shared.unreported == 0
    assert await components.remaining(rate(), money(0)) == ((100, 950) if fits else (100, 1000))


@pytest.mark.parametrize("deaf_at", ["force_reserve", "settle"])
async def test_nothing_is_told_twice(components: Components, deaf_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    components.store.away = True
    for name in await components.many(3, money(10)):
        await components.settle(name, 7)
    components.store.away = False
    monkeypatch.setattr(components.store, "answer", lambda: components.store.meet(deaf_at))
    told, heard = getattr(MemoryStorage, deaf_at), []

    async def once_unheard(self: Store, name: str, *given: Any, **named: Any) -> Any:
        answer = await told(self, name, *given, **named)
        if name not in heard:
            heard.append(name)
            raise StorageUnavailable("not heard")
        return answer

    monkeypatch.setattr(Store, deaf_at, once_unheard)
    for _ in range(6):
        await components.shared.sync_with_storage()
    assert components.shared.unreported == 0
    assert len(heard) == 3
    assert await components.remaining(money(0)) == (1000 - 21,)


async def test_what_is_to_be_told_is_bounded(components: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage_fallback, "MAX_UNREPORTED", 3)
    components.store.away = True
    assert len(await components.many(3, rate())) == 3
    with pytest.raises(StorageUnavailable, match="3 calls already"):
        await components.ask(rate())


async def test_calls_of_before_are_settled_when_the_storage_is_back(components: Components) -> None:
    limiter = Limiter(components.shared, LIMITS, clock=lambda: components.now)
    limits = {"budget": {"amount": "0.000001"}, "concurrency": 2}

    def a_new_call() -> Any:
        return a_call(policy=a_policy(tenants=[{"name": "t", "limits": limits}]))

    before = await limiter.admit(a_new_call())
    components.store.away = True
    during = await limiter.admit(a_new_call())
    with pytest.raises(LimitReached):
        await limiter.admit(a_new_call())
    await before.settle(Usage(), 400)
    await during.release_slot()
    await during.settle(Usage(), 500)
    assert limiter.unsettled == 1
    components.store.away = False
    await components.shared.sync_with_storage()
    await limiter.retry_unsettled()
    assert limiter.unsettled == 0
    budget = SpendCharge("t/budget/2026-11", 0, 1000, 1e6)
    assert await components.remaining(SlotCharge("t/concurrency", 2), budget) == (2, 100)


async def test_the_keeper_finds_the_storage_back(components: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage_fallback, "RETRY_SECONDS", 0.001)
    await components.shared.start()
    components.store.away = True
    await components.settle(str(await components.ask(money(10))), 10)
    components.store.away = False
    async with asyncio.timeout(10):
        while components.shared.in_outage or components.shared.unreported:
            await asyncio.sleep(0)
    await components.shared.stop()
    assert await components.remaining(money(0)) == (990,)


class Replica:
    """One gateway's limits on the real Redis."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self.storage = RedisStorage(server.url, owner=name)
        self.shared = OutageFallback(self.storage, MemoryStorage, lambda: StorageOutage(limits="local_share"))
        self.limiter = Limiter(self.shared, LIMITS)

    async def open(self) -> None:
        await self.storage.open()
        await self.shared.sync_with_storage()

    async def spend(self, calls: int) -> int:
        """Each costs one of 100 billionths; how many were granted."""
        granted = 0
        price = {"input": "0", "output": "0.001"}  # one billionth a token
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
async def test_two_replicas_and_a_redis_that_goes(own_redis_server: RedisServer, how: str) -> None:
    with own_redis_server.client() as client:
        client.config_set("appendfsync", "always")  # else it may forget its last two seconds, when killed
    one, two = Replica(own_redis_server, "one"), Replica(own_redis_server, "two")
    await one.open()
    await two.open()
    await one.shared.sync_with_storage()
    assert (one.shared.replicas, two.shared.replicas) == (2, 2)
    assert await one.spend(20) + await two.spend(20) == 40
    if how == "frozen":
        own_redis_server.freeze()
    else:
        own_redis_server.stop()
    try:
        granted = await one.spend(20) + await two.spend(20)  # each has 30 left, or 40 as it last heard
        assert granted == 40
        assert one.shared.in_outage and two.shared.in_outage
    finally:
        if how == "frozen":
            own_redis_server.thaw()
        else:
            own_redis_server.start()
    for replica in (one, two):
        async with asyncio.timeout(20):
            while replica.shared.in_outage or replica.shared.unreported or replica.limiter.unsettled:
                await replica.shared.sync_with_storage()
                await replica.limiter.retry_unsettled()
    (left,) = await one.shared.remaining([SpendCharge(_account(), 0, 100, 1e6)], now=0.0)
    assert left == 100 - 40 - granted
    assert await one.spend(100) + await two.spend(100) == left
    for replica in (one, two):
        await replica.storage.close()


def _account() -> str:
    return f"t/budget/{datetime.now(UTC):%Y-%m}"
