"""Phase 5: waiting for one's turn. Real-time goes before batch; inside a class, first come, first served.

A class that may be held (`hold` in the policy, as batch) is served in another order: oldest conversation first, and
prompts that begin alike one after the other, depth first, so that what is warm is used before it goes. And it may have
to wait although there are places: as long as `gateway.prefix.working_set` says that its conversation does not fit
into the caches beside those that are under way.

A call that finds a free place and nobody before it does not wait at all. Waiting costs one future: no thread, no
upstream connection. Bounds: `max_queue` calls per class and model, `max_wait` seconds, and the call's own deadline.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from gateway.errors import GatewayError, Overloaded, shutting_down
from gateway.fleet import Fleet, Place
from gateway.policy import LatencyClass, Model
from gateway.prefix.working_set import Prompt
from gateway.types import Call

RETRY_AFTER_MIN_SECONDS = 1.0
RETRY_AFTER_MAX_SECONDS = 30.0
HELD_LOOK_SECONDS = 1.0  # how often it is looked whether those that are held may go: conversations end in silence
HELD_LOOK_AT = 4  # calls that may not go, after which those behind them are not looked at
GROUP_BLOCKS = 16  # of a prompt's beginning, by which calls are grouped
GROUP_SECONDS = 60.0  # in which a group takes others in: who comes later goes behind the groups that came meanwhile


class Queued(Prompt, Protocol):
    """What the order has to know of a call."""

    @property
    def latency_class(self) -> LatencyClass: ...
    @property
    def class_name(self) -> str: ...
    @property
    def model(self) -> Model: ...


class Waiter(Protocol):
    """A call in line. Whoever takes it out of its line grants or refuses, or its caller has stopped waiting."""

    @property
    def call(self) -> Queued: ...
    @property
    def gone(self) -> bool: ...
    def grant(self, place: Place) -> None: ...
    def refuse(self, error: GatewayError) -> None: ...


W = TypeVar("W", bound=Waiter)
Key = tuple[int, str, str]


class _Line(Generic[W]):
    """The calls of one class for one model, sorted by when they, their group or their conversation began."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, Sequence[int], int, W]] = []
        self._where: dict[W, tuple[float, Sequence[int], int, W]] = {}
        self._groups: dict[int, float] = {}
        self._joined = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[W]:
        return (entry[3] for entry in self._entries)

    def at(self, index: int) -> W:
        return self._entries[index][3]

    def join(self, waiter: W, since: float | None, now: float) -> None:
        call, self._joined = waiter.call, self._joined + 1
        chain: Sequence[int] = call.fingerprint if call.may_be_held else ()
        if since is None:
            since = self._group_since(chain, now) if chain else now
        entry = self._where[waiter] = (since, chain, self._joined, waiter)
        insort(self._entries, entry)

    def _group_since(self, chain: Sequence[int], now: float) -> float:
        while self._groups and now - next(iter(self._groups.values())) > GROUP_SECONDS:
            del self._groups[next(iter(self._groups))]
        return self._groups.setdefault(chain[min(len(chain), GROUP_BLOCKS) - 1], now)

    def leave(self, waiter: W) -> None:
        entry = self._where.pop(waiter, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]


class Lines(Generic[W]):
    """Who waits, and who is next: without an event loop, so that a simulator can use it. One line per
    (priority, class, model), served in that order."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lines: dict[Key, _Line[W]] = {}
        self.someone_is_held = False  # although there are places

    def __iter__(self) -> Iterator[W]:
        return iter([waiter for line in self._lines.values() for waiter in line])

    @property
    def waiting(self) -> bool:
        return bool(self._lines)

    def depth(self, class_name: str) -> int:
        """How many calls of a class wait now."""
        return sum(len(line) for (_, name, _), line in self._lines.items() if name == class_name)

    def length_before(self, call: Queued) -> int:
        line = self._lines.get(_key(call))
        return len(line) if line else 0

    def at_once(self, call: Queued, now: float) -> Place | None:
        """A place, if there is one and nobody waits whose turn comes before this call's. Of its own line, a call that
        may be held passes the others if its conversation is under way: who waits there is not."""
        if not self._lines:
            return self._place(call, now)
        priority, model = call.latency_class.priority, call.model.name
        before = [waits for waits, _, name in self._lines if waits <= priority and name == model]
        if not before:
            return self._place(call, now)
        if call.may_be_held and min(before) == priority:
            return self._place(call, now, goes_on=True)
        return None

    def _place(self, call: Queued, now: float, *, goes_on: bool = False) -> Place | None:
        """`goes_on`: only for a conversation that has its room already."""
        servers = self._fleet.servers_of(call.model)
        if call.may_be_held:
            servers = [server for server in servers if server.has_place]
            homes = [server.estimate for server in servers]
            if not homes or not self._fleet.working_set.admit(call, homes, now, goes_on=goes_on):
                return None
        return self._fleet.take(servers)

    def join(self, waiter: W, now: float) -> None:
        """Stand in line. `serve` may grant a place at once."""
        call = waiter.call
        known = None
        if call.may_be_held:
            homes = [server.estimate for server in self._fleet.servers_of(call.model)]
            known = self._fleet.working_set.of(call, homes)
        line = self._lines.setdefault(_key(call), _Line())
        line.join(waiter, known.started if known is not None else None, now)

    def leave(self, waiter: W) -> None:
        key = _key(waiter.call)
        line = self._lines.get(key)
        if line is not None:
            line.leave(waiter)
            if not line:
                del self._lines[key]

    def serve(self, now: float) -> None:
        """Give free places away, in order. Called whenever a place comes free, when someone joins, and when the
        policy changes; and now and then while someone is held."""
        self.someone_is_held = False
        for key in sorted(self._lines):
            self._serve_line(self._lines[key], now)

    def _serve_line(self, line: _Line[W], now: float) -> None:
        held = 0  # so many at the head of the line may not go, although there are places
        while held < min(len(line), HELD_LOOK_AT):
            waiter = line.at(held)
            servers = self._fleet.servers_of(waiter.call.model)
            if not servers:
                waiter.refuse(nowhere_to_go(waiter.call.model))
            elif not waiter.gone:
                place = self._place(waiter.call, now)
                if place is None and not (waiter.call.may_be_held and any(server.has_place for server in servers)):
                    return
                if place is None:
                    self.someone_is_held = True
                    held += 1
                    continue
                waiter.grant(place)
            self.leave(waiter)


class _Waiting:
    """A call whose caller waits for `granted`."""

    __slots__ = ("call", "granted")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> bool:
        return self.granted.done()

    def grant(self, place: Place) -> None:
        self.granted.set_result(place)

    def refuse(self, error: GatewayError) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)

    def decline(self) -> None:
        """Give back a place that was granted in the very moment in which the caller stopped waiting."""
        if self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None:
            self.granted.result().release()


class _Turn:
    __slots__ = ("_call", "_place", "_queue")

    def __init__(self, queue: Queue, call: Call) -> None:
        self._queue = queue
        self._call = call

    async def __aenter__(self) -> Place:
        self._place = await self._queue.place_for(self._call)
        return self._place

    async def __aexit__(self, *_: object) -> None:
        self._place.release()


class Queue:
    """The waiting calls of a running gateway."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lines: Lines[_Waiting] = Lines(fleet)
        self._look: asyncio.TimerHandle | None = None
        self._serving = False
        self._closed = False
        fleet.on_free = self._serve_waiting

    def depth(self, class_name: str) -> int:
        """How many calls of a class wait now."""
        return self._lines.depth(class_name)

    def turn(self, call: Call) -> _Turn:
        """`async with` holds a place at one of the model's servers, waiting for it if need be. Raises `Overloaded`."""
        return _Turn(self, call)

    async def place_for(self, call: Call) -> Place:
        if self._closed:
            raise shutting_down()
        if not self._fleet.servers_of(call.model):
            raise nowhere_to_go(call.model)
        now = asyncio.get_running_loop().time()
        return self._lines.at_once(call, now) or await self._wait(_Waiting(call), now)

    async def _wait(self, waiter: _Waiting, now: float) -> Place:
        call = waiter.call
        limits = call.latency_class
        if self._lines.length_before(call) >= limits.max_queue:
            raise Overloaded(
                f"{limits.max_queue} {call.class_name} calls already wait for {call.model.name}",
                retry_after_seconds=_honest_wait(limits.max_wait),
            )
        self._lines.join(waiter, now)
        if call.may_be_held:
            self._serve_waiting()
        try:
            async with asyncio.timeout_at(min(now + limits.max_wait, call.deadline)):
                return await waiter.granted
        except TimeoutError:
            waiter.decline()
            raise Overloaded(
                f"no server of {call.model.name} became free within {limits.max_wait:g} s",
                retry_after_seconds=_honest_wait(limits.max_wait),
            ) from None
        except asyncio.CancelledError:
            waiter.decline()
            raise
        finally:
            self._lines.leave(waiter)

    def _serve_waiting(self) -> None:
        if self._closed or not self._lines.waiting:
            return
        loop = asyncio.get_running_loop()
        self._lines.serve(loop.time())
        if self._lines.someone_is_held and self._look is None:
            self._look = loop.call_later(HELD_LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._serve_waiting()

    def close(self) -> None:
        """Refuse whoever waits or comes: the gateway is shutting down."""
        self._closed = True
        for waiter in self._lines:
            waiter.refuse(shutting_down())


def _key(call: Queued) -> Key:
    return call.latency_class.priority, call.class_name, call.model.name


def _honest_wait(max_wait_seconds: float) -> float:
    """Nobody can promise that a place comes free sooner than the class itself was ready to wait."""
    return min(max(max_wait_seconds, RETRY_AFTER_MIN_SECONDS), RETRY_AFTER_MAX_SECONDS)


def nowhere_to_go(model: Model) -> Overloaded:
    return Overloaded(
        f"the policy has changed, and {model.name} has no deployment any more",
        retry_after_seconds=RETRY_AFTER_MIN_SECONDS,
    )
