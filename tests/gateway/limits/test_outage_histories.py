"""Any history of two gateways and a storage that comes and goes: no unit of money is lost, made, or left held."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import StorageUnavailable
from gateway.limits.outage_fallback import OutageFallback
from gateway.policy import StorageOutage
from gateway.storage.base import Charge, Grant, RateCharge, SlotCharge, SpendCharge
from gateway.storage.memory import MemoryStorage

BUDGET, PLACES, TOKENS, PERIOD_SECONDS = 100, 4, 40, 8.0
LEASE_SECONDS = 1e6  # none runs out here: that is what the histories of the engines are about
REPLICAS = 2
START = 1_800_000_000.0


@dataclass(frozen=True)
class Reserve:
    replica: int
    amount: int


@dataclass(frozen=True)
class Settle:
    which: int  # of the calls that go on
    cost: int


@dataclass(frozen=True)
class Tend:
    replica: int


@dataclass(frozen=True)
class Become:
    state: str  # here; away: it does nothing; deaf: it does what it is told, and nobody hears of it


@dataclass(frozen=True)
class Wait:
    seconds: int


Step = Reserve | Settle | Tend | Become | Wait
steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(Reserve, st.integers(0, REPLICAS - 1), st.integers(0, 30)),
    st.builds(Settle, st.integers(0, 9), st.integers(0, 30)),
    st.builds(Tend, st.integers(0, REPLICAS - 1)),
    st.builds(Become, st.sampled_from(["here", "away", "deaf"])),
    st.builds(Wait, st.integers(1, 5)),
)


class Store:
    """A storage as the gateways meet it."""

    def __init__(self) -> None:
        self.kept = MemoryStorage()
        self.state = "here"

    def __getattr__(self, operation: str) -> Any:
        async def meet(*given: Any, **named: Any) -> Any:
            if self.state == "away":
                raise StorageUnavailable("away")
            answer = await getattr(self.kept, operation)(*given, **named)
            if self.state == "deaf":
                raise StorageUnavailable("not heard")
            return answer

        return meet


@dataclass
class Call:
    replica: int
    name: str


def charges(amount: int) -> list[Charge]:
    return [
        RateCharge("t/tokens", amount, TOKENS, PERIOD_SECONDS),
        SlotCharge("t/concurrency", PLACES),
        SpendCharge("t/budget/total", amount, BUDGET, 1e9),
    ]


async def play(history: Sequence[Step]) -> None:
    store, now, costs = Store(), START, 0
    going_on: list[Call] = []
    unsettled: list[tuple[Call, list[int]]] = []  # as `Limiter` keeps them
    outage = StorageOutage(limits="local_share", replicas=REPLICAS)
    gateways = [OutageFallback(store, MemoryStorage, lambda: outage, clock=lambda: now) for _ in range(REPLICAS)]  # type: ignore[arg-type]

    async def settle(call: Call, actual: list[int]) -> None:
        try:
            await gateways[call.replica].settle(call.name, actual, now=now)
        except StorageUnavailable:
            unsettled.append((call, actual))

    for number, step in enumerate(history):
        match step:
            case Reserve(replica, amount):
                gateway, call = gateways[replica], Call(replica, f"t/{number}")
                verdict = await gateway.reserve(call.name, charges(amount), lease_seconds=LEASE_SECONDS, now=now)
                if isinstance(verdict, Grant):
                    going_on.append(call)
                    assert min(verdict.remaining) >= 0
            case Settle(which, cost) if which < len(going_on):
                costs += cost
                await settle(going_on.pop(which), [cost, 0, cost])
            case Tend(replica):
                await gateways[replica].sync_with_storage()
            case Become(state):
                store.state = state
            case Wait(seconds):
                now += seconds
    store.state = "here"
    for gateway in gateways:
        await gateway.sync_with_storage()
        assert (gateway.in_outage, gateway.unreported) == (False, 0)
    for call in going_on:
        costs += 1
        await settle(call, [1, 0, 1])
    while unsettled:
        await settle(*unsettled.pop())
    account = store.kept._accounts["t/budget/total"]
    assert (account.spent, account.held) == (costs, 0)
    assert await store.kept.remaining(charges(0), now=now + 1000 * PERIOD_SECONDS) == (
        TOKENS,
        PLACES,
        max(0, BUDGET - costs),
    )


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(steps, min_size=10, max_size=40))
def test_money_is_conserved_whatever_the_storage_does(history: list[Step]) -> None:
    asyncio.run(play([Reserve(0, 0), Settle(0, 0), *history]))


async def outage_of(fresh: bool, calls: int) -> int:
    """How many calls of one unit two gateways grant while the storage is away."""
    store = Store()
    outage = StorageOutage(limits="local_share", replicas=REPLICAS)
    gateways = [OutageFallback(store, MemoryStorage, lambda: outage, clock=lambda: START) for _ in range(REPLICAS)]  # type: ignore[arg-type]
    for number in range(0 if fresh else 60):
        name = f"t/before-{number}"
        asked: list[Charge] = [SpendCharge("t/budget/total", 1, BUDGET, 1e9)]
        assert isinstance(
            await gateways[number % REPLICAS].reserve(name, asked, lease_seconds=LEASE_SECONDS, now=START), Grant
        )
    store.state = "away"
    granted = 0
    for number in range(calls):
        asked = [SpendCharge("t/budget/total", 1, BUDGET, 1e9)]
        gateway = gateways[number % REPLICAS]
        verdict = await gateway.reserve(f"t/{number}", asked, lease_seconds=LEASE_SECONDS, now=START)
        granted += isinstance(verdict, Grant)
    return granted


async def test_an_outage_grants_no_more_than_was_left() -> None:
    assert await outage_of(fresh=True, calls=400) == BUDGET
    assert await outage_of(fresh=False, calls=400) == BUDGET - 60
