"""Who waits, and who is next: without an event loop, so that a simulator can use it.

There is one line for each class of each model. The more urgent class goes first, but a class to which the policy gives
a `min_share` is owed that much of what the model's calls are given while it waits, in estimated tokens: as long as it
has not had that, it goes before all others. Inside a line, `gateway.queueing.line` decides.

A class that may be held (`hold` in the policy, as batch) may have to wait although there are places: as long as
`gateway.prefix.working_set` says that its conversation does not fit into the caches beside those that are under way;
and while a server has no more places than the other classes lately had at their busiest (`Background` in the fleet).

Bounds: `max_queue` calls in each line, and `WAITING_MAX` in all. Whoever comes beyond that stands in line like the
others, and the least urgent call of the line, or of all lines, gives way; which may be the one that came.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Generic

from gateway.core.errors import RETRY_AFTER_MAX_SECONDS, Overloaded
from gateway.deployments.fleet import Fleet, SlotPermit
from gateway.policy import Model
from gateway.queueing.line import Line, Queued, W

WAITING_MAX = 10_000  # calls of one gateway: each has its connection, and its body in memory
OWED_MAX_TOKENS = 1_000_000.0  # to a class that was held although it had its share: it does not get every turn then
RETRY_AFTER_MIN_SECONDS = 1.0
RETRY_AFTER_UNKNOWN_MAX_SECONDS = 30.0  # where it is not known how fast a line moves

Key = tuple[int, str, str]  # priority, class, model


class _Owed:
    """What a class with a minimum share still has to get before the others of its model, in tokens; negative where it
    has had more."""

    __slots__ = ("share", "tokens")

    def __init__(self) -> None:
        self.share = 0.0  # as the newest call of the class says
        self.tokens = 0.0


class Lines(Generic[W]):
    def __init__(self, fleet: Fleet, *, waiting_max: int = WAITING_MAX) -> None:
        self._fleet = fleet
        self._waiting_max = waiting_max
        self._lines: dict[Key, Line[W]] = {}
        self._owed: dict[Key, _Owed] = {}  # of models for which somebody waits
        self.waiting = 0
        self.gave_way = Counter[str]()  # calls by class, for others that were more urgent or came from fewer
        self.someone_is_held = False  # although there are places

    def __iter__(self) -> Iterator[W]:
        return chain.from_iterable(list(line) for line in list(self._lines.values()))

    def depth(self, class_name: str) -> int:
        """How many calls of a class wait now."""
        return sum(len(line) for (_, name, _), line in self._lines.items() if name == class_name)

    def at_once(self, call: Queued, now: float) -> SlotPermit | None:
        """A place, if there is one and nobody waits whose turn comes before this call's. Of its own line, a call that
        may be held passes the others if its conversation is under way: who waits there is not."""
        if not self._lines:
            return self._take_slot(call, now)
        priority, model = call.latency_class.priority, call.model.name
        before = [waits for waits, _, name in self._lines if waits <= priority and name == model]
        if before and not (call.may_be_held and min(before) == priority):
            return None
        permit = self._take_slot(call, now, goes_on=bool(before))
        if permit is not None:
            self._charge(call, now)
        return permit

    def _take_slot(self, call: Queued, now: float, *, goes_on: bool = False) -> SlotPermit | None:
        """`goes_on`: only for a conversation that has its room already."""
        deployments, background = self._fleet.deployments_of(call.model), call.may_be_held
        if background:
            owed = self._owed.get(_key(call))
            if owed is not None and owed.tokens > 0:
                deployments = [deployment for deployment in deployments if deployment.has_slot]
            else:
                deployments = [deployment for deployment in deployments if deployment.has_room_for_background(now)]
            homes = [deployment.estimate for deployment in deployments]
            if not homes or not self._fleet.working_set.admit(call, homes, now, goes_on=goes_on):
                return None
        return self._fleet.take(deployments, now, background=background)

    def join(self, waiter: W, now: float) -> None:
        """Stand in line. Somebody may be refused for it, maybe `waiter` itself; `serve` may grant a place at once."""
        call, key = waiter.call, _key(waiter.call)
        limits, known = call.latency_class, None
        if call.may_be_held:
            homes = [deployment.estimate for deployment in self._fleet.deployments_of(call.model)]
            known = self._fleet.working_set.of(call, homes)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line()
        if limits.min_share or key in self._owed:
            self._owed.setdefault(key, _Owed()).share = limits.min_share
        line.join(waiter, known.started if known is not None else None, now)
        self.waiting += 1
        if len(line) > limits.max_queue:
            self._give_way(line, now, f"{limits.max_queue} {call.class_name} calls already wait for {call.model.name}")
        elif self.waiting > self._waiting_max:
            least_urgent = max(self._lines, key=lambda each: (each[0], len(self._lines[each])))
            line = self._lines[least_urgent]
            self._give_way(line, now, f"{self._waiting_max} calls already wait, others before this one")

    def _give_way(self, line: Line[W], now: float, why: str) -> None:
        last = line.last
        seconds = self.retry_after_seconds(last.call, now)
        self.leave(last)
        self.gave_way[last.call.class_name] += 1
        last.refuse(Overloaded(why, retry_after_seconds=seconds))

    def retry_after_seconds(self, call: Queued, now: float) -> float:
        """When a call that has to go may come again: when those that wait now have had their turns, at the pace of the
        last ones. Nobody waits longer than the class does; where the pace is not known, that is all that can be said.
        """
        line, max_wait = self._lines.get(_key(call)), call.latency_class.max_wait
        known = math.inf if line is None else line.empty_in_seconds(now)
        most = RETRY_AFTER_UNKNOWN_MAX_SECONDS if known == math.inf else RETRY_AFTER_MAX_SECONDS
        return max(min(known, max_wait, most), RETRY_AFTER_MIN_SECONDS)

    def leave(self, waiter: W) -> None:
        """Whoever is not in line any more may say so again."""
        key = _key(waiter.call)
        line = self._lines.get(key)
        if line is None:
            return
        self.waiting -= len(line)
        line.leave(waiter)
        self.waiting += len(line)
        if not line:
            del self._lines[key]
            if self._owed and not any(model == key[2] for _, _, model in self._lines):
                self._owed = {each: owed for each, owed in self._owed.items() if each[2] != key[2]}

    def in_vain(self, call: Queued) -> bool:
        """Whether a call of this one's line has waited as long as it might, and the line has not been empty since."""
        line = self._lines.get(_key(call))
        return line is not None and line.in_vain

    def note_in_vain(self, call: Queued) -> None:
        line = self._lines.get(_key(call))
        if line is not None:
            line.in_vain = True

    def serve(self, now: float) -> None:
        """Give free places away, in order. Called whenever a place comes free, when someone joins, and when the
        policy changes; and now and then while someone is held."""
        self.someone_is_held = False
        held: set[W] = set()
        over: set[Key] = set()  # lines of which nobody else may go
        while self._serve_in_order(now, held, over):
            pass

    def _serve_in_order(self, now: float, held: set[W], over: set[Key]) -> bool:
        """True where the order has to be looked at anew: a turn may have changed who is owed one."""
        for key in sorted(self._lines, key=self._precedence) if self._owed else sorted(self._lines):
            line = self._lines[key]
            while key not in over:
                if not self._serve_next(line, now, held):
                    over.add(key)
                elif self._owed:
                    return True
        return False

    def _precedence(self, key: Key) -> tuple[bool, Key]:
        owed = self._owed.get(key)
        return owed is None or owed.tokens <= 0, key

    def _serve_next(self, line: Line[W], now: float, held: set[W]) -> bool:
        """Whether anybody has left the line. `held` are those that are known to have to wait."""
        for waiter in line.heads():
            if waiter in held:
                continue
            deployments = self._fleet.deployments_of(waiter.call.model)
            if not deployments:
                waiter.refuse(nowhere_to_go(waiter.call.model))
            elif not waiter.gone:
                permit = self._take_slot(waiter.call, now)
                if permit is None:
                    if not (waiter.call.may_be_held and any(deployment.has_slot for deployment in deployments)):
                        return False
                    self.someone_is_held = True
                    held.add(waiter)
                    continue
                self._charge(waiter.call, now)
                waiter.grant(permit)
            self.leave(waiter)
            return True
        return False

    def _charge(self, call: Queued, now: float) -> None:
        """A call has its turn while others wait."""
        key, tokens = _key(call), max(1, call.tokens_estimate)
        line = self._lines.get(key)
        if line is not None:
            line.charge(call, now)
        for each, owed in self._owed.items():
            if each[2] == key[2]:
                owed.tokens += owed.share * tokens - (tokens if each == key else 0)
                # Who does not wait wants nothing, and saves nothing up.
                owed.tokens = min(owed.tokens, OWED_MAX_TOKENS if each in self._lines else 0.0)


def _key(call: Queued) -> Key:
    return call.latency_class.priority, call.class_name, call.model.name


def nowhere_to_go(model: Model) -> Overloaded:
    return Overloaded(
        f"the policy has changed, and {model.name} has no deployment any more",
        retry_after_seconds=RETRY_AFTER_MIN_SECONDS,
    )
