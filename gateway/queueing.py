"""Phase 5: waiting for one's turn. Real-time goes before batch; inside a class, first come, first served.

A call that finds a free place and nobody before it does not wait at all. Waiting costs one future: no thread, no
upstream connection. Bounds: `max_queue` calls per class and model, `max_wait` seconds, and the call's own deadline.
"""

from __future__ import annotations

import asyncio

from gateway.errors import Overloaded, shutting_down
from gateway.fleet import Fleet, Place
from gateway.policy import Model
from gateway.types import Call

RETRY_AFTER_MIN_SECONDS = 1.0
RETRY_AFTER_MAX_SECONDS = 30.0


class _Waiter:
    """A call in line. The one who takes it out of its line answers `granted`, or its caller has stopped waiting."""

    __slots__ = ("granted", "model")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()

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
    """The waiting calls: one line per (priority, class, model), served in that order; a line is an ordered set."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lines: dict[tuple[int, str, str], dict[_Waiter, None]] = {}
        self._closed = False
        fleet.on_free = self._serve_waiting

    def depth(self, class_name: str) -> int:
        """How many calls of a class wait now."""
        return sum(len(line) for (_, name, _), line in self._lines.items() if name == class_name)

    def turn(self, call: Call) -> _Turn:
        """`async with` holds a place at one of the model's servers, waiting for it if need be. Raises `Overloaded`."""
        return _Turn(self, call)

    async def place_for(self, call: Call) -> Place:
        if self._closed:
            raise shutting_down()
        servers = self._fleet.servers_of(call.model)
        if not servers:
            raise _nowhere_to_go(call.model)
        if not self._someone_before(call) and (place := self._fleet.take(servers)):
            return place
        return await self._wait(call, _Waiter(call.model))

    def _someone_before(self, call: Call) -> bool:
        """Whether a call for the same model waits whose turn comes before this one's."""
        priority, model = call.latency_class.priority, call.model.name
        return any(waits <= priority and name == model for waits, _, name in self._lines)

    async def _wait(self, call: Call, waiter: _Waiter) -> Place:
        limits = call.latency_class
        key = (limits.priority, call.class_name, call.model.name)
        if len(self._lines.get(key, ())) >= limits.max_queue:
            raise Overloaded(
                f"{limits.max_queue} {call.class_name} calls already wait for {call.model.name}",
                retry_after_seconds=_honest_wait(limits.max_wait),
            )
        self._lines.setdefault(key, {})[waiter] = None
        try:
            async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + limits.max_wait, call.deadline)):
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
            self._leave(key, waiter)

    def _leave(self, key: tuple[int, str, str], waiter: _Waiter) -> None:
        line = self._lines.get(key)
        if line is not None:
            line.pop(waiter, None)
            if not line:
                del self._lines[key]

    def _serve_waiting(self) -> None:
        """Give free places away, in order. Called whenever a place comes free, and when the policy changes."""
        for key in sorted(self._lines):
            while waiter := next(iter(self._lines.get(key, ())), None):
                if not waiter.granted.done():
                    servers = self._fleet.servers_of(waiter.model)
                    place = self._fleet.take(servers)
                    if place is not None:
                        waiter.granted.set_result(place)
                    elif servers:
                        break
                    else:
                        waiter.granted.set_exception(_nowhere_to_go(waiter.model))
                self._leave(key, waiter)

    def close(self) -> None:
        """Refuse whoever waits or comes: the gateway is shutting down."""
        self._closed = True
        for line in self._lines.values():
            for waiter in line:
                if not waiter.granted.done():
                    waiter.granted.set_exception(shutting_down())


def _honest_wait(max_wait_seconds: float) -> float:
    """Nobody can promise that a place comes free sooner than the class itself was ready to wait."""
    return min(max(max_wait_seconds, RETRY_AFTER_MIN_SECONDS), RETRY_AFTER_MAX_SECONDS)


def _nowhere_to_go(model: Model) -> Overloaded:
    return Overloaded(
        f"the policy has changed, and {model.name} has no deployment any more",
        retry_after_seconds=RETRY_AFTER_MIN_SECONDS,
    )
