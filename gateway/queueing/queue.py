"""Phase 5: waiting for one's turn.

A call that finds a free place and nobody before it does not wait at all. Waiting costs one future: no thread, no
upstream connection. It ends with a place, or after the class's `max_wait`, at the call's own deadline, when its client
has lost patience, or because more urgent calls have come than may wait (`gateway.queueing.lines`).

More calls than can be served would make a line in which everybody who is served has waited nearly `max_wait`. So once a
call has waited in vain, those that come after it wait a quarter as long, until the line has been empty: no fewer are
served, but sooner, and the others are told sooner (Maurer, "Fail at Scale", 2015, of CoDel). Calls that may be held are
there to wait, and do.
"""

from __future__ import annotations

import asyncio

from gateway.core.errors import GatewayError, Overloaded, shutting_down
from gateway.deployments.fleet import Fleet, SlotPermit
from gateway.queueing.lines import Lines, nowhere_to_go
from gateway.types import Call

IN_VAIN_SHARE = 0.25  # of `max_wait`, while calls wait in vain
HELD_LOOK_SECONDS = 1.0  # how often it is looked whether those that are held may go: conversations end in silence


class _Waiting:
    """A call whose caller waits for `granted`."""

    __slots__ = ("call", "due", "granted")

    def __init__(self, call: Call, now: float, max_wait: float) -> None:
        self.call = call
        self.due = min(now + min(max_wait, call.read_timeout_seconds), call.deadline)
        self.granted: asyncio.Future[SlotPermit] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> bool:
        return self.granted.done()

    def grant(self, permit: SlotPermit) -> None:
        self.granted.set_result(permit)

    def refuse(self, error: GatewayError) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)

    def decline(self) -> None:
        """Give back a place that was granted in the very moment in which the caller stopped waiting."""
        if self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None:
            self.granted.result().release()


class Queue:
    """The waiting calls of a running gateway."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lines: Lines[_Waiting] = Lines(fleet)
        self._look: asyncio.TimerHandle | None = None
        self._closed = False
        fleet.on_free = self._serve_waiting

    def depth(self, class_name: str) -> int:
        """How many calls of a class wait now."""
        return self._lines.depth(class_name)

    def gave_way(self, class_name: str) -> int:
        """How many calls of a class were refused because more had come than may wait."""
        return self._lines.gave_way[class_name]

    async def turn(self, call: Call) -> SlotPermit:
        """A place at one of the model's servers, waited for if need be; `with` gives it back. Raises `Overloaded`."""
        if self._closed:
            raise shutting_down()
        now = asyncio.get_running_loop().time()
        return self._lines.at_once(call, now) or await self._wait(call, now)

    async def _wait(self, call: Call, now: float) -> SlotPermit:
        if not self._fleet.deployments_of(call.model):
            raise nowhere_to_go(call.model)
        max_wait = call.latency_class.max_wait
        if self._lines.in_vain(call) and not call.may_be_held:
            max_wait *= IN_VAIN_SHARE
        waiter = _Waiting(call, now, max_wait)
        self._lines.join(waiter, now)
        if call.may_be_held:
            self._serve_waiting()
        try:
            async with asyncio.timeout_at(waiter.due):
                return await waiter.granted
        except TimeoutError:
            waiter.decline()
            if waiter.due >= now + max_wait:  # and not the call's own deadline or patience
                self._lines.note_in_vain(call)
            raise Overloaded(
                f"no server of {call.model.name} became free within {waiter.due - now:g} s",
                retry_after_seconds=self._lines.retry_after_seconds(call, waiter.due),
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
