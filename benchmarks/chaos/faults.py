"""The faults: a schedule that is drawn from the seed, and how each fault is done and undone.

Faults run beside each other. Each kind occurs once before any occurs again. One fault at a time is done to one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import httpx2

from benchmarks.chaos.machine import Clock, Disk
from benchmarks.ledger_faults import Replica
from tests.e2e.processes import Running
from tests.redis_server import RedisServer

FAULT_SECONDS = (1.5, 6.0)  # between the beginnings of two faults
SETTLED_SHARE = (
    0.2  # of the run, after which the gateway "two" is not killed any more, so that its memory can be judged
)
UNAWARE_SHARE = 0.03  # of the calls, for which the load balancer does not know yet that a gateway is dead
RESTART_SECONDS_MAX = 600.0  # on a machine that is busy with other work
CLOCK_STEPS = (-86_400 * 3, -3600, -90, -5, 5, 90, 3600, 86_400 * 3)  # seconds from the right time
KINDS = (
    "gateway killed", "gateway killed", "engine killed", "engine frozen", "redis killed", "redis frozen", "disk full",
    "clock step", "clock step", "burst",
)  # fmt: skip

Interval = tuple[float, float]


class ChaosGateway:
    """One gateway with a clock and a disk of its own, and what was done to it and when."""

    def __init__(self, replica: Replica, clock: Clock, disk: Disk) -> None:
        self.replica = replica
        self.clock = clock
        self.disk = disk
        self.lock = asyncio.Lock()  # one fault at a time
        self._dead: list[Interval] = []
        self._full: list[Interval] = []

    @property
    def port(self) -> int:
        return self.replica.port

    @property
    def pid(self) -> int:
        assert self.replica.front is not None
        return self.replica.front.process.pid

    def was_dead(self, *, since: float) -> bool:
        """Whether it was killed at any time since then."""
        return any(end >= since for _, end in self._dead)

    def had_full_disk(self, *, since: float) -> bool:
        """Whether its disk was full, or had been until a moment before."""
        return any(end >= since for _, end in self._full)

    @contextlib.contextmanager
    def _during(self, intervals: list[Interval], linger_seconds: float = 0.0) -> Iterator[None]:
        intervals.append((time.monotonic(), float("inf")))
        place = len(intervals) - 1
        try:
            yield
        finally:
            intervals[place] = (intervals[place][0], time.monotonic() + linger_seconds)

    async def kill(self, pause_seconds: float, problems: list[str]) -> None:
        async with self.lock:
            with self._during(self._dead):
                try:
                    await asyncio.to_thread(self.replica.kill)
                except AssertionError as error:  # its log has a stack trace
                    problems.append(f"gateway {self.replica.name}: {str(error)[-2000:]}")
                await asyncio.sleep(pause_seconds)
                await self._start()

    async def _start(self) -> None:
        """Start it again as a supervisor does: until it runs. It does not start while Redis is away."""
        deadline = time.monotonic() + RESTART_SECONDS_MAX
        while True:
            try:
                return await asyncio.to_thread(self.replica.start)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise

    async def fill_disk(self, seconds: float) -> None:
        """Fill the disk for a while."""
        async with self.lock:
            # The gateway tries a write once a second, so it learns a little later that there is space again.
            with self._during(self._full, linger_seconds=3.0):
                await asyncio.to_thread(self.disk.fill)
                await asyncio.sleep(seconds)
                self.disk.free()


class Gateways(list[ChaosGateway]):
    def choose(self, rng: random.Random) -> ChaosGateway:
        """A gateway, as a load balancer chooses it, which mostly knows which one is dead."""
        alive = [each for each in self if not each.was_dead(since=time.monotonic())]
        return rng.choice(alive if alive and rng.random() > UNAWARE_SHARE else self)


@dataclass
class Engines:
    """The engines. `a` and `b` live through the run, and `mortal` is killed."""

    a: Running
    b: Running
    mortal: Running
    restart_mortal: Callable[[], Awaitable[None]]


@dataclass
class Faults:
    """The schedule, and how often each fault was done."""

    gateways: Gateways
    engines: Engines
    store: RedisServer
    burst: Callable[[int], Awaitable[None]]
    rng: random.Random
    problems: list[str]
    done: Counter[str] = field(default_factory=Counter)
    _locks: dict[str, asyncio.Lock] = field(default_factory=lambda: {"engine": asyncio.Lock(), "redis": asyncio.Lock()})

    async def run(self, seconds: float) -> None:
        """Run the schedule, and wait until its last fault is undone."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for at, kind in schedule(seconds, self.rng):
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                tasks.create_task(self._do(kind, settled=at > seconds * SETTLED_SHARE, rng=_child(self.rng)))

    async def _do(self, kind: str, *, settled: bool, rng: random.Random) -> None:
        target = self.gateways[0] if settled and kind == "gateway killed" else rng.choice(self.gateways)
        if (lock := self._lock_of(kind, target)) is not None and lock.locked():
            print(f"{time.strftime('%H:%M:%S')} {kind}: skipped, because an earlier fault is not over", flush=True)
            return
        self.done[kind] += 1
        print(f"{time.strftime('%H:%M:%S')} {kind}", flush=True)
        match kind:
            case "gateway killed":
                await target.kill(rng.random(), self.problems)
            case "engine killed":
                async with self._locks["engine"]:
                    await asyncio.to_thread(self.engines.mortal.kill)
                    await asyncio.sleep(rng.random() * 2)
                    await self.engines.restart_mortal()
            case "engine frozen":
                with rng.choice([self.engines.a, self.engines.b]).frozen():
                    await asyncio.sleep(rng.uniform(0.5, 3.0))
            case "redis killed":
                async with self._locks["redis"]:
                    await asyncio.to_thread(self.store.stop)
                    await asyncio.sleep(rng.random() * 2)
                    await asyncio.to_thread(self.store.start)
            case "redis frozen":
                async with self._locks["redis"]:
                    self.store.freeze()
                    await asyncio.sleep(rng.uniform(0.3, 2.0))
                    self.store.thaw()
            case "disk full":
                if target.disk.real:
                    await target.fill_disk(rng.uniform(2.0, 5.0))
                else:
                    self.done["disk full"] -= 1
            case "clock step":
                target.clock.step(rng.choice(CLOCK_STEPS))
            case "burst":
                await self.burst(rng.randint(150, 300))

    def _lock_of(self, kind: str, target: ChaosGateway) -> asyncio.Lock | None:
        """The lock that the fault takes. On a slow machine faults would queue there, and run long after the load."""
        if kind in ("gateway killed", "disk full"):
            return target.lock
        return None if kind == "engine frozen" else self._locks.get(kind.split()[0])


def _child(rng: random.Random) -> random.Random:
    return random.Random(rng.random())


def schedule(seconds: float, rng: random.Random) -> Iterator[tuple[float, str]]:
    """Faults with the second at which each begins, in order."""
    at, kinds = 0.0, list[str]()
    while (at := at + rng.uniform(*FAULT_SECONDS)) < seconds:
        if not kinds:
            kinds = rng.sample(KINDS, len(KINDS))
        yield at, kinds.pop()


def is_ready(port: int) -> bool:
    """Whether the gateway says that it takes calls."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/ready", timeout=5.0).status_code == 200
    except httpx2.TransportError:
        return False
