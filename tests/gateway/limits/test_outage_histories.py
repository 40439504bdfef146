"""Random histories of two gateways and an unreliable storage: no unit of money is lost, created or left reserved."""

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

BUDGET, SLOTS, TOKENS, PERIOD_SECONDS = 100, 4, 40, 8.0
LEASE_SECONDS = 1e6  # no lease ends here; `tests/contract/test_storage_histories.py` covers that
REPLICAS = 2
START = 1_800_000_000.0


@dataclass(frozen=True)
class Reserve:
    replica: int
    amount: int


@dataclass(frozen=True)
class Settle:
    which: int  # of the running calls
    cost: int


@dataclass(frozen=True)
class Sync:
    replica: int


@dataclass(frozen=True)
class SetState:
    state: str  # reachable; unreachable: operations fail; answers_lost: they act, but their answers never arrive


@dataclass(frozen=True)
class Wait:
    seconds: int


Step = Reserve | Settle | Sync | SetState | Wait
steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(Reserve, st.integers(0, REPLICAS - 1), st.integers(0, 30)),
    st.builds(Settle, st.integers(0, 9), st.integers(0, 30)),
    st.builds(Sync, st.integers(0, REPLICAS - 1)),
    st.builds(SetState, st.sampled_from(["reachable", "unreachable", "answers_lost"])),
    st.builds(Wait, st.integers(1, 5)),
)


class Store:
    """A storage with a connection that fails as `state` says."""

    def __init__(self) -> None:
        self.memory = MemoryStorage()
        self.state = "reachable"

    def __getattr__(self, operation: str) -> Any:
        async def operate(*given: Any, **named: Any) -> Any:
            if self.state == "unreachable":
                raise StorageUnavailable("timed out")
            answer = await getattr(self.memory, operation)(*given, **named)
            if self.state == "answers_lost":
                raise StorageUnavailable("connection lost")
            return answer

        return operate


@dataclass
class Call:
    replica: int
    name: str


def charges(amount: int) -> list[Charge]:
    return [
        RateCharge("t/tokens", amount, TOKENS, PERIOD_SECONDS),
        SlotCharge("t/concurrency", SLOTS),
        SpendCharge("t/budget/total", amount, BUDGET, 1e9),
    ]


async def replay(history: Sequence[Step]) -> None:
    store, now, costs = Store(), START, 0
    running: list[Call] = []
    unsettled: list[tuple[Call, list[int]]] = []  # as `Limiter` retries them
    outage = StorageOutage(limits="local_share", replicas=REPLICAS)
    gateways = [OutageFallback(store, MemoryStorage, lambda: outage, clock=lambda: now) for _ in range(REPLICAS)]

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
                    running.append(call)
                    assert min(verdict.remaining) >= 0
            case Settle(which, cost) if which < len(running):
                costs += cost
                await settle(running.pop(which), [cost, 0, cost])
            case Sync(replica):
                await gateways[replica].sync_with_storage()
            case SetState(state):
                store.state = state
            case Wait(seconds):
                now += seconds
    store.state = "reachable"
    for gateway in gateways:
        await gateway.sync_with_storage()
        assert (gateway.in_outage, gateway.unreported) == (False, 0)
    for call in running:
        costs += 1
        await settle(call, [1, 0, 1])
    while unsettled:
        await settle(*unsettled.pop())
    account = store.memory._accounts["t/budget/total"]
    assert (account.spent, account.held) == (costs, 0)
    assert await store.memory.remaining(charges(0), now=now + 1000 * PERIOD_SECONDS) == (
        TOKENS,
        SLOTS,
        max(0, BUDGET - costs),
    )


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(steps, min_size=10, max_size=40))
def test_money_is_conserved_whatever_the_storage_does(history: list[Step]) -> None:
    asyncio.run(replay([Reserve(0, 0), Settle(0, 0), *history]))


async def granted_in_an_outage(fresh: bool, calls: int) -> int:
    """How many calls of one unit two gateways grant while the storage is unreachable."""
    store = Store()
    outage = StorageOutage(limits="local_share", replicas=REPLICAS)
    gateways = [OutageFallback(store, MemoryStorage, lambda: outage, clock=lambda: START) for _ in range(REPLICAS)]
    for number in range(0 if fresh else 60):
        name = f"t/before-{number}"
        asked: list[Charge] = [SpendCharge("t/budget/total", 1, BUDGET, 1e9)]
        assert isinstance(
            await gateways[number % REPLICAS].reserve(name, asked, lease_seconds=LEASE_SECONDS, now=START), Grant
        )
    store.state = "unreachable"
    granted = 0
    for number in range(calls):
        asked = [SpendCharge("t/budget/total", 1, BUDGET, 1e9)]
        gateway = gateways[number % REPLICAS]
        verdict = await gateway.reserve(f"t/{number}", asked, lease_seconds=LEASE_SECONDS, now=START)
        granted += isinstance(verdict, Grant)
    return granted


async def test_an_outage_grants_no_more_than_was_left() -> None:
    assert await granted_in_an_outage(fresh=True, calls=400) == BUDGET
    assert await granted_in_an_outage(fresh=False, calls=400) == BUDGET - 60
