"""Random histories of every engine against the definition: what a fair book-keeper with all of history would say."""

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
LEASE_SECONDS = 8.0  # longer than the period: calls outlive what they poured in
START = 1_800_000_000.0  # all times are quarters of a second from here: exact as floats
NEVER_SECONDS = 1e9
PATIENT_SECONDS = 60.0  # a busy machine is not what is tested


@dataclass(frozen=True)
class Scope:
    """A tenant, one of its keys, or a part of its calls: each has limits of its own."""

    part: str
    tokens: int
    places: int
    budget: int


SCOPES = (Scope("", 16, 3, 60), Scope("key%20ci/", 10, 2, 40), Scope("model%20m/", 12, 3, 50))
MOST = SCOPES[0]


@dataclass
class Held:
    charges: list[Charge]
    poured: list[int | None]  # the index of each rate in its key's pourings
    expires: float
    forgotten: float
    left: bool = False


@dataclass
class BookKeeper:
    """Remembers everything and recomputes it each time. A refund rewrites history: the call only took what it used."""

    poured: defaultdict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    spent: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    held: dict[str, Held] = field(default_factory=dict)

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
            if each.key == charge.key and not (held.left and isinstance(each, SlotCharge))
        ]
        return charge.limit - self.spent[charge.key] - sum(holding)

    def reserve(self, name: str, charges: list[Charge], now: float) -> list[int] | None:
        """What is left of each charge, or None for a refusal."""
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
        self.held[name] = Held(charges, poured, expires, expires + REMEMBER_SECONDS)

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

    def leave(self, name: str, now: float) -> bool:
        held = self.held.get(name)
        if held is None or held.expires <= now or held.left:
            return False
        held.left = any(isinstance(charge, SlotCharge) for charge in held.charges)
        return held.left

    def extend(self, name: str, now: float) -> bool:
        held = self.held.get(name)
        if held is None or held.expires <= now:
            return False
        held.expires, held.forgotten = now + LEASE_SECONDS, now + LEASE_SECONDS + REMEMBER_SECONDS
        return True

    def crash(self, now: float) -> int:
        holding = [held for held in self.held.values() if held.expires > now]
        for held in holding:
            held.expires = now
        return len(holding)


@dataclass(frozen=True)
class Reserve:
    tokens: int | None
    place: bool
    money: int | None
    scopes: frozenset[Scope]
    granted_elsewhere: bool = False  # and now adopted, whether it fits or not


@dataclass(frozen=True)
class Settle:
    which: int  # of the reservations made so far, counted from the latest; settled ones too
    tokens: int
    money: int


@dataclass(frozen=True)
class Extend:
    which: int


@dataclass(frozen=True)
class Leave:
    which: int


@dataclass(frozen=True)
class Wait:
    quarters: int


@dataclass(frozen=True)
class Crash:
    """The process is killed, and comes back under its old name."""


Step = Reserve | Settle | Extend | Leave | Wait | Crash
amounts = st.integers(0, MOST.tokens)
scopes = st.frozensets(st.sampled_from(SCOPES), min_size=1)
busy = st.builds(Reserve, st.integers(1, MOST.tokens), st.just(False), st.none(), scopes)
mixed = st.builds(
    Reserve, st.none() | amounts, st.booleans(), st.none() | amounts, scopes, st.sampled_from([False] * 5 + [True])
)
settles = st.builds(Settle, st.integers(0, 5), amounts, amounts)
others = st.builds(Extend, st.integers(0, 5)) | st.builds(Leave, st.integers(0, 5)) | st.builds(Crash)
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


def charges(tenant: str, asked: Reserve) -> list[Charge]:
    """Of every scope that the call is in, all in one step."""
    found: list[Charge] = []
    for scope in SCOPES:
        if scope in asked.scopes:
            prefix = f"{tenant}/{scope.part}"
            if asked.tokens is not None:
                found.append(RateCharge(f"{prefix}tokens", asked.tokens, scope.tokens, PERIOD_SECONDS))
            if asked.place:
                found.append(SlotCharge(f"{prefix}concurrency", scope.places))
            if asked.money is not None:
                found.append(SpendCharge(f"{prefix}budget/total", asked.money, scope.budget, NEVER_SECONDS))
    return found


def used(charges: list[Charge], tokens: int, money: int) -> list[int]:
    return [
        tokens if isinstance(charge, RateCharge) else money if isinstance(charge, SpendCharge) else 0
        for charge in charges
    ]


async def play(storage: Storage, tenant: str, history: list[Step]) -> None:
    book, now, made = BookKeeper(), START, list[tuple[str, list[Charge]]]()
    for step in history:
        match step:
            case Reserve(granted_elsewhere=True):
                name, asked = f"{tenant}/{len(made)}", charges(tenant, step)
                book.hold(name, asked, now)
                await storage.force_reserve(name, asked, lease_seconds=LEASE_SECONDS, now=now)
                made.append((name, asked))
            case Reserve():
                name, asked = f"{tenant}/{len(made)}", charges(tenant, step)
                expected = book.reserve(name, asked, now)
                verdict = await storage.reserve(name, asked, lease_seconds=LEASE_SECONDS, now=now)
                assert (list(verdict.remaining) if isinstance(verdict, Grant) else None) == expected
                if isinstance(verdict, Grant):
                    made.append((name, asked))
            case Settle(which, tokens, money) if which < len(made):
                name, asked = made[-1 - which]
                actual = used(asked, tokens, money)
                assert await storage.settle(name, actual, now=now) == book.settle(name, actual, now)
            case Extend(which) if which < len(made):
                name, _ = made[-1 - which]
                extended = await storage.extend_lease(name, lease_seconds=LEASE_SECONDS, now=now)
                assert extended == book.extend(name, now)
            case Leave(which) if which < len(made):
                name, _ = made[-1 - which]
                assert await storage.release_slots(name, now=now) == book.leave(name, now)
            case Wait(quarters):
                now += quarters / 4
            case Crash():
                assert await storage.expire_leases("me", now=now) == book.crash(now)
    await nothing_sticks(storage, tenant, book, now + 1000 * PERIOD_SECONDS)


async def nothing_sticks(storage: Storage, tenant: str, book: BookKeeper, much_later: float) -> None:
    """All that was not really spent is there again, whole, to the last unit."""
    everything = charges(tenant, Reserve(0, True, 0, frozenset(SCOPES)))
    expected = [max(0, charge.limit - book.spent[charge.key]) for charge in everything]
    assert list(await storage.remaining(everything, now=much_later)) == expected


@pytest.mark.parametrize(("engine", "examples"), [("memory", 600), ("sqlite", 150), ("redis", 100)])
def test_any_history_is_as_the_book_keeper_says(
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
            # The owner's reservations of an earlier example are not this one's.
            runner.run(storage.expire_leases("me", now=START))
            runner.run(play(storage, f"{engine}{next(numbers)}", history))

        check()
