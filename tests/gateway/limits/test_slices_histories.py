"""Random histories of gateways that lease slices from one storage, with kills, lost answers and late reports.

Slices are checked against the limits themselves: what calls use never exceeds a limit, whatever a gateway holds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.core.errors import StorageUnavailable
from gateway.core.ids import new_event_id
from gateway.limits.slices import Slices
from gateway.storage.base import Charge, Grant, RateCharge, SlotCharge, SpendCharge, Storage
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

GATEWAYS = 2
START = 1_800_000_000.0
TOKENS, PERIOD_SECONDS = 200, 100.0
SLOTS, BUDGET = 100, 500
TOLERANCE = 1  # in tokens: of the arithmetic with floats
PATIENT_SECONDS = 60.0


@dataclass(frozen=True)
class Admit:
    gateway: int
    amount: int
    calls: int


@dataclass(frozen=True)
class End:
    which: int  # of the running calls
    used: int  # at most the reserved amount


@dataclass(frozen=True)
class EndAll:
    used: int


@dataclass(frozen=True)
class Report:
    gateway: int


@dataclass(frozen=True)
class Kill:
    gateway: int  # starts again at once, under the same name


@dataclass(frozen=True)
class SetState:
    state: str


@dataclass(frozen=True)
class Wait:
    quarters: int  # of a second; all gateways report once a second


Step = Admit | End | EndAll | Report | Kill | SetState | Wait
gateways = st.integers(0, GATEWAYS - 1)
steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(Admit, gateways, st.integers(0, 4), st.integers(1, 30)),
    st.builds(Admit, gateways, st.integers(0, 4), st.integers(1, 30)),
    st.builds(End, st.integers(0, 30), st.integers(0, 4)),
    st.builds(End, st.integers(0, 30), st.integers(2, 4)),
    st.builds(EndAll, st.integers(0, 4)),
    st.builds(Report, gateways),
    st.builds(Kill, gateways),
    st.builds(SetState, st.sampled_from(["reachable", "reachable", "unreachable", "answers_lost"])),
    st.builds(Wait, st.integers(1, 12)),
)
ENDLESS = 600  # waits, until every lease has ended and every rate has refilled


class Store:
    """A storage with a connection that fails as `state` says."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.state = "reachable"

    def __getattr__(self, operation: str) -> Any:
        async def operate(*given: Any, **named: Any) -> Any:
            if self.state == "unreachable":
                raise StorageUnavailable("timed out")
            answer = await getattr(self.storage, operation)(*given, **named)
            if self.state == "answers_lost":
                raise StorageUnavailable("connection lost")
            return answer

        return operate


@dataclass
class Call:
    gateway: int
    name: str
    leased: bool
    reserved: int
    at: float
    used: int | None = None  # None while it runs, and for ever if its gateway was killed


@dataclass
class World:
    storage: Storage
    tenant: str
    store: Any = None
    now: float = START
    calls: list[Call] = field(default_factory=list)
    running: list[Call] = field(default_factory=list)
    ledgers: list[list[tuple[str, int, bool]]] = field(default_factory=lambda: [[] for _ in range(GATEWAYS)])
    slices: list[Slices] = field(default_factory=list)
    unsettled: list[tuple[int, str, list[int]]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.store = Store(self.storage)
        self.slices = [self.new_gateway(number) for number in range(GATEWAYS)]

    def new_gateway(self, number: int) -> Slices:
        slices = Slices(
            self.store, f"g{number}", replicas=lambda: GATEWAYS, clock=lambda: self.now, monotonic=lambda: self.now
        )
        slices.begin_leasing()
        return slices

    def charges(self, amount: int) -> list[Charge]:
        return [
            RateCharge(f"{self.tenant}/tokens", amount, TOKENS, PERIOD_SECONDS),
            SlotCharge(f"{self.tenant}/concurrency", SLOTS),
            SpendCharge(f"{self.tenant}/budget/total", amount, BUDGET, 1e9),
        ]

    async def admit(self, number: int, amount: int) -> bool | None:
        """As the limiter does. None: the storage did not answer."""
        slices, name, charges = self.slices[number], f"{self.tenant}/{next(self.numbers)}", self.charges(amount)
        try:
            leased = slices.take(name, charges) or await slices.lease(name, charges)
            verdict = leased or await slices.reserve(name, charges, lease_seconds=30.0, now=self.now)
        except StorageUnavailable:
            self.unsettled.append((number, name, [0, 0, 0]))
            return None
        if isinstance(verdict, Grant):
            call = Call(number, name, verdict.leased, amount, self.now)
            self.calls.append(call)
            self.running.append(call)
        return isinstance(verdict, Grant)

    async def end(self, call: Call, used: int) -> None:
        self.running.remove(call)
        call.used, receipt = used, new_event_id()
        self.ledgers[call.gateway].append((receipt, used, call.leased))
        slices = self.slices[call.gateway]
        if call.leased:
            assert slices.bill(call.name, [used, 0, used], receipt)
        await self.settle(call.gateway, call.name, [used, 0, used])

    async def settle(self, number: int, name: str, actual: list[int]) -> None:
        try:
            await self.slices[number].settle(name, actual, now=self.now)
        except StorageUnavailable:
            self.unsettled.append((number, name, actual))

    async def report(self, number: int) -> None:
        unsettled, self.unsettled = self.unsettled, []
        for each in unsettled:
            await self.settle(*each)
        await self.slices[number].report_all()

    async def kill(self, number: int) -> None:
        """Kill a gateway and start it again. The calls that it ran have no receipts, so they used nothing."""
        self.running = [call for call in self.running if call.gateway != number]
        self.unsettled = [each for each in self.unsettled if each[0] != number]
        await self.storage.expire_leases(f"g{number}", now=self.now)
        self.slices[number] = slices = self.new_gateway(number)
        leased = {receipt: used for receipt, used, leased in self.ledgers[number] if leased}
        missing = await slices.unsettled_receipts(self.tenant, f"g{number}", list(leased))
        if missing:
            charge = replace(self.charges(0)[2], amount=sum(leased[each] for each in missing))
            assert isinstance(charge, SpendCharge)
            await slices.charge_receipts(self.tenant, f"g{number}", [charge], missing[-1])

    @property
    def spent(self) -> int:
        return sum(used for ledger in self.ledgers for _, used, _ in ledger)

    def check(self) -> None:
        assert len(self.running) <= SLOTS
        assert self.spent + sum(call.reserved for call in self.running) <= BUDGET
        level, time = Fraction(0), START
        for call in self.calls:
            level = max(Fraction(0), level - Fraction(call.at - time) * TOKENS / int(PERIOD_SECONDS))
            level, time = level + (call.reserved if call.used is None else call.used), call.at
            assert level <= TOKENS + TOLERANCE

    async def wait(self, quarters: int) -> None:
        for _ in range(quarters):
            self.now += 0.25
            if self.now == int(self.now):
                for number in range(GATEWAYS):
                    await self.report(number)


async def play(storage: Storage, tenant: str, history: Sequence[Step]) -> None:
    world = World(storage, tenant)
    for step in history:
        match step:
            case Admit(number, amount, calls):
                await asyncio.gather(*(world.admit(number, amount) for _ in range(calls)))
            case End(which, used) if which < len(world.running):
                call = world.running[which]
                await world.end(call, min(used, call.reserved))
            case EndAll(used):
                for call in list(world.running):
                    await world.end(call, min(used, call.reserved))
            case Report(number):
                await world.report(number)
            case Kill(number):
                state, world.store.state = world.store.state, "reachable"
                settling = [each for each in world.unsettled if each[0] == number]
                await world.kill(number)
                for each in settling:  # crash recovery settles calls that were reserved one by one by their receipts
                    await world.settle(*each)
                world.store.state = state
            case SetState(state):
                world.store.state = state
            case Wait(quarters):
                await world.wait(quarters if world.store.state == "reachable" else min(quarters, 4))
                if world.store.state != "reachable":  # outages are shorter than leases
                    world.store.state = "reachable"
                    await world.wait(4)
        world.check()
    await everything_returns(world)


async def everything_returns(world: World) -> None:
    """Much later, budgets equal the ledgers, and everything that was not spent is available to another gateway."""
    world.store.state = "reachable"
    for call in list(world.running):
        await world.end(call, 0)
    await world.wait(ENDLESS)
    assert all(slices.unreported == 0 and slices.call_count == 0 for slices in world.slices)
    left = list(await world.storage.remaining(world.charges(0), now=world.now))
    assert left == [TOKENS, SLOTS, BUDGET - world.spent]
    both = zip(world.charges(0), left, strict=True)
    everything = [replace(charge, amount=amount) for charge, amount in both if not isinstance(charge, SlotCharge)]
    verdict = await world.storage.reserve(f"{world.tenant}/all", everything, lease_seconds=1.0, now=world.now)
    assert isinstance(verdict, Grant)


def storage_of(engine: str, folder: Path, server: RedisServer) -> Storage:
    if engine == "memory":
        return MemoryStorage()
    if engine == "sqlite":
        return SqliteStorage(f"sqlite:///{folder / 'state.db'}", timeout_seconds=PATIENT_SECONDS, clock=lambda: START)
    return RedisStorage(server.url, timeout_seconds=PATIENT_SECONDS, clock="caller")


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "examples"), [("memory", 400), ("sqlite", 40), ("redis", 40)])
def test_no_history_exceeds_a_limit_or_loses_an_amount(
    engine: str, examples: int, tmp_path: Path, redis_server: RedisServer
) -> None:
    numbers = itertools.count()
    with redis_server.client() as client:
        client.flushall()
    with asyncio.Runner() as runner:
        storage = storage_of(engine, tmp_path, redis_server)
        runner.run(storage.open())

        @settings(
            max_examples=examples, derandomize=True, database=None, deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )  # fmt: skip
        @given(st.lists(steps, min_size=5, max_size=50))
        @example(
            [
                Admit(0, 1, 30),
                EndAll(1),
                Admit(1, 1, 9),
                EndAll(1),
                Wait(1),
                Kill(0),
                Admit(1, 4, 30),
                EndAll(4),
                Admit(1, 4, 30),
            ]
        )
        @example([Admit(0, 5, 3), End(0, 5), Report(0), End(0, 4), Kill(0)])  # one receipt reported, and one not
        @example(
            [
                Admit(0, 1, 30),
                EndAll(1),
                Admit(1, 1, 9),
                EndAll(1),
                Wait(1),
                Kill(0),
                Admit(1, 4, 30),
                EndAll(4),
                Admit(1, 4, 30),
            ]
        )
        @example([Admit(0, 5, 3), End(0, 5), SetState("answers_lost"), Report(0), Kill(0)])
        def check(history: list[Step]) -> None:
            runner.run(play(storage, f"{engine}{next(numbers)}", history))

        try:
            check()
        finally:
            runner.run(storage.close())


one_gateway: st.SearchStrategy[Step] = st.one_of(
    st.builds(Admit, st.just(0), st.integers(0, 100), st.integers(1, 6)),
    st.builds(End, st.integers(0, 30), st.integers(0, 100)),
    st.builds(Wait, st.integers(1, 12)),
)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.lists(one_gateway, min_size=5, max_size=60))
def test_a_gateway_alone_admits_exactly_what_the_limits_allow(history: list[Step]) -> None:
    """Its slices never keep a call out that the limits admit."""

    async def replay() -> None:
        world = World(MemoryStorage(), "t")
        world.charges = lambda amount: [  # type: ignore[method-assign]
            SlotCharge("t/concurrency", SLOTS), SpendCharge("t/budget/total", amount, BUDGET, 1e9)
        ]  # fmt: skip
        for step in history:
            match step:
                case Admit(_, amount, calls):
                    for _ in range(calls):
                        reserved = sum(call.reserved for call in world.running)
                        fits = len(world.running) < SLOTS and world.spent + reserved + amount <= BUDGET
                        assert await world.admit(0, amount) == fits
                case End(which, used) if which < len(world.running):
                    call = world.running[which]
                    used = min(used, call.reserved)
                    world.running.remove(call)
                    world.ledgers[0].append((receipt := new_event_id(), used, call.leased))
                    if call.leased:
                        world.slices[0].bill(call.name, [0, used], receipt)
                    await world.settle(0, call.name, [0, used])
                case Wait(quarters):
                    await world.wait(quarters)

    asyncio.run(replay())
