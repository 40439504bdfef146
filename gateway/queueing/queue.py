"""Phase 5: waits for a concurrency slot at one of the model's deployments.

A call does not wait if a slot is free and no call is queued before it. A waiting call costs one future, but no thread
and no upstream connection. The wait ends when

* the call gets a slot,
* the class's `max_wait`, the call's deadline or its client's announced timeout (`gateway.core.deadlines`) passes, or
* the call is shed, because more calls are queued than the bounds allow (`gateway.queueing.scheduler`).

If more calls arrive than can be served, each served call would wait for almost `max_wait`. Therefore, once a call has
timed out in a queue, the calls that arrive later wait only for a quarter of `max_wait`, until the queue becomes empty.
The same number of calls is served, but sooner, and the others are rejected sooner (Maurer, "Fail at Scale", 2015, on
CoDel). Calls of background classes are exempt, because they are expected to wait.

Minimal path 5 of 7. Next: ../routing/prefix_affinity.py.
"""

from __future__ import annotations

import asyncio

from gateway.core.errors import GatewayError, Overloaded, shutting_down
from gateway.core.timers import time_bound
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.queueing.scheduler import QueueScheduler, no_deployment_error
from gateway.types import Call

OVERLOADED_WAIT_SHARE = 0.25  # share of `max_wait` that calls wait while their queue is overloaded
HELD_RECHECK_SECONDS = 1.0  # how often calls that are held back are checked: no event reports a conversation's end


class _WaitingCall:
    """A queued call. Its caller awaits the future `granted`."""

    __slots__ = ("call", "due", "granted")

    def __init__(self, call: Call, now: float, max_wait: float) -> None:
        self.call = call
        self.due = min(now + min(max_wait, call.read_timeout_seconds), call.deadline)
        self.granted: asyncio.Future[SlotPermit] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        return self.granted.done()

    def grant(self, permit: SlotPermit) -> None:
        self.granted.set_result(permit)

    def reject(self, error: GatewayError) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)

    def decline(self) -> None:
        """Release the slot if it was granted at the moment when the caller stopped waiting."""
        if self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None:
            self.granted.result().release()


class Queue:
    """The queued calls of a running gateway. All methods must be called on one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.scheduler: QueueScheduler[_WaitingCall] = QueueScheduler(fleet)
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._closed = False
        fleet.on_slot_free = self._grant_free_slots

    def depth(self, class_name: str) -> int:
        """Return the number of calls of a latency class that are queued now."""
        return self.scheduler.depth(class_name)

    async def acquire_slot(self, call: Call) -> SlotPermit:
        """Acquire a slot at one of the model's deployments. Waits in the queue if necessary.

        The slot is a context manager: leaving its `with` block releases the slot. Raises `Overloaded` if the call is
        shed, if its wait times out, or if the gateway is shutting down.
        """
        if self._closed:
            raise shutting_down()
        now = asyncio.get_running_loop().time()
        return self.scheduler.take_now(call, now) or await self._wait(call, now)

    async def _wait(self, call: Call, now: float) -> SlotPermit:
        if not self._fleet.with_slots_for(call.model) and not self._fleet.awaits_instances(call.model):
            raise no_deployment_error(call.model)
        max_wait = call.latency_class.max_wait
        if self.scheduler.is_overloaded(call) and not call.may_be_held:
            max_wait *= OVERLOADED_WAIT_SHARE
        waiter = _WaitingCall(call, now, max_wait)
        self.scheduler.add(waiter, now)
        if call.latency_class.hold != "off":
            # If all calls queued before this one are held back, a slot may be free for this call.
            self._grant_free_slots()
        try:
            async with time_bound(waiter.due - now):
                return await waiter.granted
        except TimeoutError:
            waiter.decline()
            if waiter.due >= now + max_wait:  # not if the call's own deadline or patience was shorter
                self.scheduler.note_timeout(call)
            raise Overloaded(
                f"no deployment of {call.model_name} had a free slot within {waiter.due - now:g} s",
                retry_after_seconds=self.scheduler.retry_after_seconds(call, waiter.due),
            ) from None
        except asyncio.CancelledError:
            waiter.decline()
            raise
        finally:
            self.scheduler.remove(waiter)

    def _grant_free_slots(self) -> None:
        if self._closed or not self.scheduler.waiting:
            return
        loop = asyncio.get_running_loop()
        self.scheduler.grant_free_slots(loop.time())
        if self._recheck_timer is not None:
            self._recheck_timer.cancel()
        if self.scheduler.has_held_calls:
            at = min(loop.time() + HELD_RECHECK_SECONDS, self.scheduler.next_hold_end)
            self._recheck_timer = loop.call_at(at, self._grant_free_slots)

    def close(self) -> None:
        """Reject all queued calls and all later calls, because the gateway is shutting down."""
        self._closed = True
        for waiter in self.scheduler:
            waiter.reject(shutting_down())
