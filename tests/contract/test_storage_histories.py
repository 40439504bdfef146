"""Random histories of reservations in every engine, compared with a model that remembers and recomputes everything."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.storage.base import REMEMBER_SECONDS, Charge, Grant, RateCharge, SlotCharge, SpendCharge, Storage
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

PERIOD_SECONDS = 4.0
LEASE_SECONDS = 8.0  # longer than the period, so rates refill while calls run
START = 1_800_000_000.0  # all times are this plus quarters of a second, which floats represent exactly
NEVER_SECONDS = 1e9
PATIENT_SECONDS = 60.0  # these tests must not fail on a busy machine


@dataclass(frozen=True)
class Scope:
    """A tenant, one of its keys, or one model of its calls: each has its own limits."""

    part: str
    tokens: int
    slots: int
    budget: int


SCOPES = (Scope("", 16, 3, 60), Scope("key%20ci/", 10, 2, 40), Scope("model%20m/", 12, 3, 50))
MOST = SCOPES[0]


@dataclass
class HeldReservation:
    charges: list[Charge]
    poured: list[int | None]  # the index of each rate in its key's pourings
    expires: float
    forgotten: float
    released: bool = False


@dataclass
class Model:
    """Remembers all pourings and recomputes the levels each time. A refund rewrites history to the amount used."""

    poured: defaultdict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    spent: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    held: dict[str, HeldReservation] = field(default_factory=dict)

    def room(self, charge: Charge, now: float) -> Fraction | int:
        if isinstance(charge, RateCharge):
            level, time = Fraction(0), Fraction(0)
            for poured_at, amount in [*self.poured[charge.key], (now, 0)]:
                leaked = (Fraction(poured_at) - time) * charge.limit / int(PERIOD_SECONDS)
                level, time = max(Fraction(0), level - leaked) + amount, Fraction(poured_at)
            return charge.limit - level
        holding = [
            each.amount
            for held in self.held.values()
            if held.expires > now
            for each in held.charges
            if each.key == charge.key and not (held.released and isinstance(each, SlotCharge))
        ]
        return charge.limit - self.spent[charge.key] - sum(holding)

    def reserve(self, name: str, charges: list[Charge], now: float) -> list[int] | None:
        """What is left of each charge, or None for a rejection."""
        left = [self.room(charge, now) - charge.amount for charge in charges]
        if any(room < 0 for room in left):
            return None
        self.hold(name, charges, now)
        return [int(room) for room in left]

    def hold(self, name: str, charges: list[Charge], now: float) -> None:
        poured: list[int | None] = []
        for charge in charges:
            poured.append(len(self.poured[charge.key]) if isinstance(charge, RateCharge) else None)
            if isinstance(charge, RateCharge):
                self.poured[charge.key].append((now, charge.amount))
        expires = now + LEASE_SECONDS
        self.held[name] = HeldReservation(charges, poured, expires, expires + REMEMBER_SECONDS)

    def settle(self, name: str, actual: list[int], now: float) -> bool:
        held = self.held.pop(name, None)
        if held is None or held.forgotten <= now:
            return False
        for charge, index, used in zip(held.charges, held.poured, actual, strict=True):
            if index is not None:
                poured_at, reserved = self.poured[charge.key][index]
                self.poured[charge.key][index] = (poured_at, min(reserved, used))
                if used > reserved:
                    self.poured[charge.key].append((now, used - reserved))
            elif isinstance(charge, SpendCharge):
                self.spent[charge.key] += used
        return True

    def release_slots(self, name: str, now: float) -> bool:
        held = self.held.get(name)
        if held is None or held.expires <= now or held.released:
            return False
        held.released = any(isinstance(charge, SlotCharge) for charge in held.charges)
        return held.released

    def extend_lease(self, name: str, now: float) -> bool:
        held = self.held.get(name)
        if held is None or held.expires <= now:
            return False
        held.expires, held.forgotten = now + LEASE_SECONDS, now + LEASE_SECONDS + REMEMBER_SECONDS
        return True

    def expire_leases(self, now: float) -> int:
        holding = [held for held in self.held.values() if held.expires > now]
        for held in holding:
            held.expires = now
        return len(holding)


@dataclass(frozen=True)
class Reserve:
    tokens: int | None
    slot: bool
    budget: int | None
    scopes: frozenset[Scope]
    forced: bool = False  # by `force_reserve`


@dataclass(frozen=True)
class Settle:
    which: int  # reservation, counted from the latest; settled ones are counted, too
    tokens: int
    budget: int


@dataclass(frozen=True)
class ExtendLease:
    which: int


@dataclass(frozen=True)
class ReleaseSlots:
    which: int


@dataclass(frozen=True)
class Wait:
    quarters: int


@dataclass(frozen=True)
class Crash:
    """The process is killed, and starts again with the same owner name."""


Step = Reserve | Settle | ExtendLease | ReleaseSlots | Wait | Crash
amounts = st.integers(0, MOST.tokens)
scopes = st.frozensets(st.sampled_from(SCOPES), min_size=1)
busy = st.builds(Reserve, st.integers(1, MOST.tokens), st.just(False), st.none(), scopes)
mixed = st.builds(
    Reserve, st.none() | amounts, st.booleans(), st.none() | amounts, scopes, st.sampled_from([False] * 5 + [True])
)
settles = st.builds(Settle, st.integers(0, 5), amounts, amounts)
others = st.builds(ExtendLease, st.integers(0, 5)) | st.builds(ReleaseSlots, st.integers(0, 5)) | st.builds(Crash)
waits = st.builds(Wait, st.integers(1, 24) | st.just(4 * (int(REMEMBER_SECONDS) - 4)))
short_waits = st.builds(Wait, st.integers(1, 4))
histories = st.one_of(
    st.lists(st.one_of(mixed, settles, others, waits), min_size=10, max_size=40),
    st.lists(st.one_of(busy, settles, short_waits), min_size=10, max_size=40),
)


@contextmanager
def opened(engine: str, folder: Path, server: RedisServer) -> Iterator[tuple[asyncio.Runner, Storage]]:
    storage: Storage
    with asyncio.Runner() as runner:
        if engine == "memory":
            storage = MemoryStorage(owner="me")
        elif engine == "sqlite":
            url = f"sqlite:///{folder / 'state.db'}"
            storage = SqliteStorage(url, owner="me", timeout_seconds=PATIENT_SECONDS, clock=lambda: START)
        else:
            storage = RedisStorage(server.url, owner="me", timeout_seconds=PATIENT_SECONDS, clock="caller")
        runner.run(storage.open())
        try:
            yield runner, storage
        finally:
            runner.run(storage.close())


def charges_of(tenant: str, step: Reserve) -> list[Charge]:
    """The charges of every scope that the call is in."""
    found: list[Charge] = []
    for scope in SCOPES:
        if scope in step.scopes:
            prefix = f"{tenant}/{scope.part}"
            if step.tokens is not None:
                found.append(RateCharge(f"{prefix}tokens", step.tokens, scope.tokens, PERIOD_SECONDS))
            if step.slot:
                found.append(SlotCharge(f"{prefix}concurrency", scope.slots))
            if step.budget is not None:
                found.append(SpendCharge(f"{prefix}budget/total", step.budget, scope.budget, NEVER_SECONDS))
    return found


def actual_amounts(charges: list[Charge], tokens: int, budget: int) -> list[int]:
    return [
        tokens if isinstance(charge, RateCharge) else budget if isinstance(charge, SpendCharge) else 0
        for charge in charges
    ]


async def play(storage: Storage, tenant: str, history: list[Step]) -> None:
    model, now, made = Model(), START, list[tuple[str, list[Charge]]]()
    for step in history:
        match step:
            case Reserve(forced=True):
                name, charges = f"{tenant}/{len(made)}", charges_of(tenant, step)
                model.hold(name, charges, now)
                await storage.force_reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
                made.append((name, charges))
            case Reserve():
                name, charges = f"{tenant}/{len(made)}", charges_of(tenant, step)
                expected = model.reserve(name, charges, now)
                outcome = await storage.reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
                assert (list(outcome.remaining) if isinstance(outcome, Grant) else None) == expected
                if isinstance(outcome, Grant):
                    made.append((name, charges))
            case Settle(which, tokens, budget) if which < len(made):
                name, charges = made[-1 - which]
                actual = actual_amounts(charges, tokens, budget)
                assert await storage.settle(name, actual, now=now) == model.settle(name, actual, now)
            case ExtendLease(which) if which < len(made):
                name, _ = made[-1 - which]
                extended = await storage.extend_lease(name, lease_seconds=LEASE_SECONDS, now=now)
                assert extended == model.extend_lease(name, now)
            case ReleaseSlots(which) if which < len(made):
                name, _ = made[-1 - which]
                assert await storage.release_slots(name, now=now) == model.release_slots(name, now)
            case Wait(quarters):
                now += quarters / 4
            case Crash():
                assert await storage.expire_leases("me", now=now) == model.expire_leases(now)
    await everything_returns(storage, tenant, model, now + 1000 * PERIOD_SECONDS)


async def everything_returns(storage: Storage, tenant: str, model: Model, much_later: float) -> None:
    """Much later, everything that was not spent is available again, to the last unit."""
    everything = charges_of(tenant, Reserve(0, True, 0, frozenset(SCOPES)))
    expected = [max(0, charge.limit - model.spent[charge.key]) for charge in everything]
    assert list(await storage.remaining(everything, now=much_later)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "examples"), [("memory", 600), ("sqlite", 150), ("redis", 100)])
def test_every_engine_agrees_with_the_model_over_any_history(
    engine: str, examples: int, tmp_path: Path, redis_server: RedisServer
) -> None:
    numbers = itertools.count()
    with redis_server.client() as client:
        client.flushall()
    with opened(engine, tmp_path, redis_server) as (runner, storage):

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(histories)
        def check(history: list[Step]) -> None:
            # Ends the leases that an earlier example has left for this owner.
            runner.run(storage.expire_leases("me", now=START))
            runner.run(play(storage, f"{engine}{next(numbers)}", history))

        check()
