"""Random histories of every engine against the definition: what a fair book-keeper with all of history would say."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.storage.base import REMEMBER_SECONDS, Charge, Granted, LeaseCharge, RateCharge, SpendCharge, Storage
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

TOKENS, PERIOD_SECONDS, PLACES, BUDGET = 16, 4.0, 3, 60
LEASE_SECONDS = 8.0  # longer than the period: calls outlive what they poured in
START = 1_800_000_000.0  # all times are quarters of a second from here: exact as floats
NEVER_SECONDS = 1e9
PATIENT_SECONDS = 60.0  # a busy machine is not what is tested


@dataclass
class Held:
    tokens: int | None  # the index in `BookKeeper.poured`; None where no tokens were asked for
    places: int
    money: int
    expires: float
    forgotten: float
    settles_money: bool


@dataclass
class BookKeeper:
    """Remembers everything and recomputes it each time. A refund rewrites history: the call only took what it used."""

    poured: list[tuple[float, int]] = field(default_factory=list)
    spent: int = 0
    held: dict[str, Held] = field(default_factory=dict)

    def left(self, now: float) -> tuple[Fraction, int, int]:
        level, time = Fraction(0), Fraction(0)
        for poured_at, amount in [*self.poured, (now, 0)]:
            leaked = (Fraction(poured_at) - time) * TOKENS / int(PERIOD_SECONDS)
            level, time = max(Fraction(0), level - leaked) + amount, Fraction(poured_at)
        holding = [held for held in self.held.values() if held.expires > now]
        return (
            TOKENS - level,
            PLACES - sum(held.places for held in holding),
            BUDGET - self.spent - sum(held.money for held in holding),
        )

    def reserve(self, name: str, tokens: int | None, place: bool, money: int | None, now: float) -> list[int] | None:
        """What is left of each charge, or None for a refusal."""
        free = self.left(now)
        wanted: list[tuple[int | None, Fraction | int]] = [
            (tokens, free[0]),
            (1 if place else None, free[1]),
            (money, free[2]),
        ]
        left = [room - amount for amount, room in wanted if amount is not None]
        if any(room < 0 for room in left):
            return None
        if tokens is not None:
            self.poured.append((now, tokens))
        index = None if tokens is None else len(self.poured) - 1
        expires = now + LEASE_SECONDS
        self.held[name] = Held(
            index, int(place), money or 0, expires, expires + REMEMBER_SECONDS, settles_money=money is not None
        )
        return [int(room) for room in left]

    def settle(self, name: str, tokens: int, money: int, now: float) -> bool:
        held = self.held.pop(name, None)
        if held is None or held.forgotten <= now:
            return False
        if held.tokens is not None:
            poured_at, reserved = self.poured[held.tokens]
            self.poured[held.tokens] = (poured_at, min(reserved, tokens))
            if tokens > reserved:
                self.poured.append((now, tokens - reserved))
        self.spent += money if held.settles_money else 0
        return True

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


@dataclass(frozen=True)
class Settle:
    which: int  # of the reservations made so far, counted from the latest; settled ones too
    tokens: int
    money: int


@dataclass(frozen=True)
class Extend:
    which: int


@dataclass(frozen=True)
class Wait:
    quarters: int


@dataclass(frozen=True)
class Crash:
    """The process is killed, and comes back under its old name."""


Step = Reserve | Settle | Extend | Wait | Crash
amounts = st.integers(0, TOKENS)
busy = st.builds(Reserve, st.integers(1, TOKENS), st.just(False), st.none())
mixed = st.builds(Reserve, st.none() | amounts, st.booleans(), st.none() | amounts)
settles = st.builds(Settle, st.integers(0, 5), amounts, amounts)
extends = st.builds(Extend, st.integers(0, 5))
waits = st.builds(Wait, st.integers(1, 24) | st.just(4 * (int(REMEMBER_SECONDS) - 4)))
short_waits = st.builds(Wait, st.integers(1, 4))
histories = st.one_of(
    st.lists(st.one_of(mixed, settles, extends, waits, st.builds(Crash)), min_size=10, max_size=40),
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


def charges(tenant: str, tokens: int | None, place: bool, money: int | None) -> list[Charge]:
    asked: list[Charge] = []
    if tokens is not None:
        asked.append(RateCharge(f"{tenant}/tokens", tokens, TOKENS, PERIOD_SECONDS))
    if place:
        asked.append(LeaseCharge(f"{tenant}/concurrency", PLACES))
    if money is not None:
        asked.append(SpendCharge(f"{tenant}/budget/total", money, BUDGET, NEVER_SECONDS))
    return asked


async def play(storage: Storage, tenant: str, history: list[Step]) -> None:
    book, now, made = BookKeeper(), START, list[tuple[str, Reserve]]()
    for step in history:
        match step:
            case Reserve(tokens, place, money):
                name = f"{tenant}/{len(made)}"
                expected = book.reserve(name, tokens, place, money, now)
                asked = charges(tenant, tokens, place, money)
                verdict = await storage.reserve(name, asked, lease_seconds=LEASE_SECONDS, now=now)
                assert (list(verdict.remaining) if isinstance(verdict, Granted) else None) == expected
                if isinstance(verdict, Granted):
                    made.append((name, step))
            case Settle(which, tokens, money) if which < len(made):
                name, of = made[-1 - which]
                used = [tokens] * (of.tokens is not None) + [0] * of.place + [money] * (of.money is not None)
                assert await storage.settle(name, used, now=now) == book.settle(name, tokens, money, now)
            case Extend(which) if which < len(made):
                name, _ = made[-1 - which]
                extended = await storage.extend(name, lease_seconds=LEASE_SECONDS, now=now)
                assert extended == book.extend(name, now)
            case Wait(quarters):
                now += quarters / 4
            case Crash():
                assert await storage.release_owner("me", now=now) == book.crash(now)
    await nothing_sticks(storage, tenant, book, now + 1000 * PERIOD_SECONDS)


async def nothing_sticks(storage: Storage, tenant: str, book: BookKeeper, much_later: float) -> None:
    """All that was not really spent is there again, whole."""
    unspent = max(0, BUDGET - book.spent)
    if book.spent <= BUDGET:
        asked = charges(tenant, TOKENS, True, unspent)
        verdict = await storage.reserve(f"{tenant}/last", asked, lease_seconds=LEASE_SECONDS, now=much_later)
        assert verdict == Granted((0, PLACES - 1, 0))


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
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(histories)
        def check(history: list[Step]) -> None:
            # The owner's reservations of an earlier example are not this one's.
            runner.run(storage.release_owner("me", now=START))
            runner.run(play(storage, f"{engine}{next(numbers)}", history))

        check()
