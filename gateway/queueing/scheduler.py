"""Decides which queued call gets the next slot, and which calls are shed. No event loop, so the simulator can run it.

There is one `FairQueue` per latency class and model. The class with the lower `priority` number goes first. While a
class with a `min_share` has queued calls, it gets at least that share of the estimated tokens of its model's calls. As
long as it has had less, it goes before all other classes. `gateway.queueing.fair_queue` orders the calls within a
queue.

Calls of a class with `hold: always` or `hold: auto` in the policy may be held back. A call that is held back waits
although slots are free,

* while `gateway.prefix.working_set` says that its conversation does not fit into the prefix caches beside the running
  conversations, or
* if its class is in the background, such as batch: while the other classes may need the deployment's free slots,
  judging by their recent peak (`BackgroundSlots` in `gateway.deployments.fleet`).

Calls of a class with `hold_max` are held for at most that time, and at most half of the time that they may wait. Others
are held in the working set for at most `HELD_SECONDS_MAX`, because a conversation that pauses much would end much later
by longer holds, and save no more computation.

Two bounds limit queued calls: `max_queue` for each queue, and `WAITING_MAX` for all queues together. If a new call
exceeds a bound, it is queued first, and then one call is shed, which may be the new one. If it exceeds `max_queue`, the
last call of that queue is shed. If it exceeds `WAITING_MAX`, the last call of the longest queue of the least urgent
class is shed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Generic

from gateway.core.errors import RETRY_AFTER_MAX_SECONDS, Overloaded
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import Model
from gateway.queueing.fair_queue import FairQueue, QueueableCall, W

WAITING_MAX = 10_000  # queued calls of one gateway; each has an open connection, and its body is in memory
CREDIT_MAX_TOKENS = 1_000_000.0  # bounds the credit of a class below its share, which would take all slots later
RETRY_AFTER_MIN_SECONDS = 1.0
HELD_SECONDS_MAX = 1_200.0  # for which a call without a `hold_max` is held because its conversation does not fit
HOLD_SHARE = 0.5  # of the time that a call may wait, for which it is held at most if its class has a `hold_max`
RETRY_AFTER_UNKNOWN_MAX_SECONDS = 30.0  # if the queue's pace is unknown

# Priority, class, and the model with its deployments, because a route may leave a call only some of them.
Key = tuple[int, str, tuple[str, tuple[str, ...]]]


class _ShareCredit:
    """Number of tokens that a class with a minimum share is granted before the other classes of its model.

    The number is negative if the class has had more than its share.
    """

    __slots__ = ("share", "tokens")

    def __init__(self) -> None:
        self.share = 0.0  # the `min_share` of the class, from its newest call
        self.tokens = 0.0


class QueueScheduler(Generic[W]):
    """All queued calls of one gateway, and the order in which they get slots. Not thread-safe.

    The scheduler reads no clock: callers pass the time.
    """

    def __init__(self, fleet: Fleet, *, waiting_max: int = WAITING_MAX) -> None:
        self._fleet = fleet
        self._waiting_max = waiting_max
        self._queues: dict[Key, FairQueue[W]] = {}  # none of them empty
        self._credits: dict[Key, _ShareCredit] = {}  # of models with queued calls
        self.waiting = 0
        self._waiting_by_model = Counter[str]()
        self.shed = Counter[str]()  # calls since the start, by class
        self.has_held_calls = False  # set by `grant_free_slots`: a call waits although a slot is free
        self.next_hold_end = math.inf  # set by it, too: when the first of these has been held for as long as it may be

    def __iter__(self) -> Iterator[W]:
        """Iterate over all queued calls, in no particular order. The queues may change during the iteration."""
        return chain.from_iterable(list(queue) for queue in list(self._queues.values()))

    def depth(self, class_name: str) -> int:
        """Return the number of calls of a latency class that are queued now."""
        return sum(len(queue) for (_, name, _), queue in self._queues.items() if name == class_name)

    def oldest_seconds(self, class_name: str, now: float) -> float:
        """Return how long the oldest queued call of a latency class has waited; 0 if none is queued."""
        queued = [queue.oldest_at for (_, name, _), queue in self._queues.items() if name == class_name]
        return now - min(queued) if queued else 0.0

    def take_now(self, call: QueueableCall, now: float) -> SlotPermit | None:
        """Take a free slot for a call without queueing it. None if no slot is free, or if queued calls go first.

        A call that may be held back overtakes the calls of its own queue if its conversation is running. The
        conversations of the queued calls are not running.
        """
        if not self._queues:
            return self._take_slot(call, now)
        priority, model = call.latency_class.priority, _key(call)[2]
        before = [queued for queued, _, name in self._queues if queued <= priority and name == model]
        # No call may overtake a queue of a more urgent class, which has a lower priority number.
        if before and not (min(before) == priority and (call.may_be_held or self._may_hold(call, now))):
            return None
        permit = self._take_slot(call, now, running_only=bool(before))
        if permit is not None:
            self._charge(call, now)
        return permit

    def _may_hold(self, call: QueueableCall, now: float) -> bool:
        """Whether a call that is not of the background may be held for room in the caches now."""
        limits = call.latency_class
        return limits.hold == "auto" and limits.hold_max is not None and now < self._fleet.working_set.tracked_until

    def _take_slot(
        self, call: QueueableCall, now: float, *, running_only: bool = False, may_hold: bool = True
    ) -> SlotPermit | None:
        """Take a free slot. If `running_only`, only for a call whose conversation already has room in the caches.

        Unless `may_hold`, the call has been held for as long as it may be.
        """
        deployments, background = self._fleet.with_slots_for(call.model), call.may_be_held
        if background:
            credit = self._credits.get(_key(call))
            if credit is not None and credit.tokens > 0:
                deployments = [deployment for deployment in deployments if deployment.has_slot]
            else:
                deployments = [deployment for deployment in deployments if deployment.has_room_for_background(now)]
            homes = [deployment.estimate for deployment in deployments]
            auto = call.latency_class.hold == "auto"
            if not homes:
                return None
            # Also for a call that has been held for long enough: it may have room now.
            fits = self._fleet.working_set.admit(call, homes, now, running_only=running_only, auto=auto)
            if may_hold and not fits:
                return None
        elif may_hold and now < self._fleet.working_set.tracked_until and self._may_hold(call, now):
            homes = [deployment.estimate for deployment in deployments if deployment.has_slot]
            if not homes or not self._fleet.working_set.admit(call, homes, now, running_only=running_only, auto=True):
                return None
        return self._fleet.take(deployments, now, background=background)

    def add(self, waiter: W, now: float) -> None:
        """Queue a call. If a bound is exceeded, one call is shed, which may be this one.

        Grants no slots. Call `grant_free_slots` afterwards if a slot may be free.
        """
        call, key = waiter.call, _key(waiter.call)
        limits, known = call.latency_class, None
        if call.may_be_held:
            homes = [deployment.estimate for deployment in self._fleet.deployments_of(call.model)]
            known = self._fleet.working_set.find(call, homes)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = FairQueue()
        if limits.min_share or key in self._credits:
            self._credits.setdefault(key, _ShareCredit()).share = limits.min_share
        queue.add(waiter, known.started if known is not None else None, now)
        self._count(call.model, 1)
        if len(queue) > limits.max_queue:
            why = f"{limits.max_queue} {call.class_name} calls are already queued for {call.model.name}"
            self._shed(queue, now, why)
        elif self.waiting > self._waiting_max:
            least_urgent = max(self._queues, key=lambda each: (each[0], len(self._queues[each])))
            queue = self._queues[least_urgent]
            self._shed(queue, now, f"{self._waiting_max} calls are already queued, and others go before this one")

    def _shed(self, queue: FairQueue[W], now: float, why: str) -> None:
        last = queue.next_to_shed
        seconds = self.retry_after_seconds(last.call, now)
        self.remove(last)
        self.shed[last.call.class_name] += 1
        last.reject(Overloaded(why, retry_after_seconds=seconds))

    def retry_after_seconds(self, call: QueueableCall, now: float) -> float:
        """Estimate in how many seconds the queue is empty: the `retry-after` time of a rejected call.

        At most the class's `max_wait`, since no call waits longer. If the queue's pace is unknown, the answer is
        `max_wait`, but at most `RETRY_AFTER_UNKNOWN_MAX_SECONDS`.
        """
        queue, max_wait = self._queues.get(_key(call)), call.latency_class.max_wait
        known = math.inf if queue is None else queue.drain_seconds(now)
        most = RETRY_AFTER_UNKNOWN_MAX_SECONDS if known == math.inf else RETRY_AFTER_MAX_SECONDS
        return max(min(known, max_wait, most), RETRY_AFTER_MIN_SECONDS)

    def remove(self, waiter: W) -> None:
        """Remove a queued call. Does nothing if the call is not queued any more."""
        key = _key(waiter.call)
        queue = self._queues.get(key)
        if queue is None:
            return
        before = len(queue)
        queue.remove(waiter)
        self._count(waiter.call.model, len(queue) - before)
        if not queue:
            del self._queues[key]
            if self._credits and not any(model == key[2] for _, _, model in self._queues):
                self._credits = {each: credit for each, credit in self._credits.items() if each[2] != key[2]}

    def _count(self, model: Model, change: int) -> None:
        """Add to the number of queued calls, and tell the router, which considers how many wait."""
        self.waiting += change
        self._waiting_by_model[model.name] += change
        self._fleet.note_queued(model, self._waiting_by_model[model.name])
        if not self._waiting_by_model[model.name]:
            del self._waiting_by_model[model.name]

    def is_overloaded(self, call: QueueableCall) -> bool:
        """Return whether a call in this call's queue has timed out since the queue was last empty."""
        queue = self._queues.get(_key(call))
        return queue is not None and queue.is_overloaded

    def note_timeout(self, call: QueueableCall) -> None:
        """Mark a call's queue as overloaded, because the call has waited for all of its class's `max_wait`."""
        queue = self._queues.get(_key(call))
        if queue is not None:
            queue.is_overloaded = True

    def grant_free_slots(self, now: float) -> None:
        """Grant free slots to queued calls, in order.

        Call this when a slot is released, when a call that may be held back is queued, and when the policy changes.
        While `has_held_calls` is true, also call it periodically.
        """
        self.has_held_calls, self.next_hold_end = False, math.inf
        held: set[W] = set()
        exhausted: set[Key] = set()  # queues in which no other call can get a slot now
        while self._grant_in_order(now, held, exhausted):
            pass

    def _grant_in_order(self, now: float, held: set[W], exhausted: set[Key]) -> bool:
        """Grant slots queue by queue. Returns True if a grant may have changed the order of the queues."""
        for key in sorted(self._queues, key=self._precedence) if self._credits else sorted(self._queues):
            queue = self._queues[key]
            while key not in exhausted:
                if not self._grant_next(queue, now, held):
                    exhausted.add(key)
                elif self._credits:
                    return True
        return False

    def _precedence(self, key: Key) -> tuple[bool, Key]:
        """Sort key of a queue. Classes that have had less than their minimum share come before the others."""
        credit = self._credits.get(key)
        return credit is None or credit.tokens <= 0, key

    def _grant_next(self, queue: FairQueue[W], now: float, held: set[W]) -> bool:
        """Grant a slot to a queue's next call. Returns whether a call was removed. `held` collects calls held back."""
        if not queue:
            return False
        oldest = queue.oldest
        for waiter in (oldest, *queue.candidates()) if now >= _hold_end(queue, oldest) else queue.candidates():
            if waiter in held:
                continue
            deployments = self._fleet.with_slots_for(waiter.call.model)
            if not deployments:
                if self._fleet.awaits_instances(waiter.call.model):
                    return False
                waiter.reject(no_deployment_error(waiter.call.model))
            elif not waiter.done:
                hold_end = _hold_end(queue, waiter)
                permit = self._take_slot(waiter.call, now, may_hold=now < hold_end)
                if permit is None:
                    may_hold = waiter.call.may_be_held or (now < hold_end and self._may_hold(waiter.call, now))
                    if not (may_hold and any(deployment.has_slot for deployment in deployments)):
                        return False
                    self.has_held_calls = True
                    self.next_hold_end = min(self.next_hold_end, hold_end, _hold_end(queue, oldest))
                    held.add(waiter)
                    continue
                self._charge(waiter.call, now)
                waiter.grant(permit)
            self.remove(waiter)
            return True
        return False

    def _charge(self, call: QueueableCall, now: float) -> None:
        """Charge a slot that was granted while other calls are queued to the call's tenant and to the class's share."""
        key, tokens = _key(call), max(1, call.tokens_estimate)
        queue = self._queues.get(key)
        if queue is not None:
            queue.charge(call, now)
        for each, credit in self._credits.items():
            if each[2] == key[2]:
                credit.tokens += credit.share * tokens - (tokens if each == key else 0)
                # A class accumulates no credit while it has no queued calls.
                credit.tokens = min(credit.tokens, CREDIT_MAX_TOKENS if each in self._queues else 0.0)


def _key(call: QueueableCall) -> Key:
    return call.latency_class.priority, call.class_name, (call.model.name, call.model.deployments)


def _hold_end(queue: FairQueue[W], waiter: W) -> float:
    """Until when a queued call may be held for room in the caches."""
    limits, queued_at = waiter.call.latency_class, queue.queued_at(waiter)
    if limits.hold == "off":
        return math.inf
    if limits.hold != "auto" or limits.hold_max is None:
        return queued_at + HELD_SECONDS_MAX
    return queued_at + min(limits.hold_max, HOLD_SHARE * max(0.0, waiter.due - queued_at))


def no_deployment_error(model: Model) -> Overloaded:
    """Return the error for a queued call whose model has no deployments any more after a reload of the policy."""
    return Overloaded(
        f"the policy has changed, and {model.name} has no deployment any more",
        retry_after_seconds=RETRY_AFTER_MIN_SECONDS,
    )
