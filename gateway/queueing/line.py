"""The calls of one class that wait for one model: tenants in fair turns, and in a turn the tenant's most urgent call.

    between tenants   start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time, which each
                      of its calls moves on by the tokens that it may use; the one that is furthest behind is next. A
                      tenant that comes begins where the line is now: it has no claim to turns it did not wait for.
    of one tenant     who stops waiting first goes first, which is who came first where clients name no deadlines. Calls
                      that may be held go otherwise: the oldest conversation or group of prompts that begin alike, and
                      in it depth first, so that what is warm is used before it goes.

When there are too many, the last call of the tenant with the most gives way. So a thousand calls of one tenant cost
another one's single call neither its turn nor its place in the line.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from gateway.core.errors import GatewayError
from gateway.deployments.fleet import SlotPermit
from gateway.policy import LatencyClass, Model
from gateway.prefix.working_set import Prompt
from gateway.queueing.ordered import Ordered

HELD_LOOK_TENANTS = 4  # whose calls may not go, after which the others' are not looked at
HELD_LOOK_AT = 4  # of a tenant's calls, likewise
PACE_TURNS = 32  # the newest ones, by which it is told how fast a line moves
PACE_TURNS_MIN = 4
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
    @property
    def tenant_name(self) -> str: ...
    @property
    def tokens_estimate(self) -> int: ...


class Waiter(Protocol):
    """A call in line. Whoever takes it out of its line grants or refuses, or its caller has stopped waiting."""

    @property
    def call(self) -> Queued: ...
    @property
    def due(self) -> float: ...  # when it stops waiting
    @property
    def gone(self) -> bool: ...
    def grant(self, permit: SlotPermit) -> None: ...
    def refuse(self, error: GatewayError) -> None: ...


W = TypeVar("W", bound=Waiter)
Entry = tuple[float, Sequence[int], int, W]
"""When it is due or when its group began, its chain where that matters, and a number that tells apart."""


class _Backlog(Generic[W]):
    """One tenant's waiting calls. `turn` is its entry among the tenants, by its virtual time."""

    __slots__ = ("_groups", "calls", "tenant", "turn")

    def __init__(self, tenant: str, starts_at: float, number: int) -> None:
        self.tenant = tenant
        self.turn = (starts_at, number, self)
        self.calls: Ordered[Entry[W]] = Ordered()
        self._groups: dict[int, float] = {}

    def group_since(self, chain: Sequence[int], now: float) -> float:
        while self._groups and now - next(iter(self._groups.values())) > GROUP_SECONDS:
            del self._groups[next(iter(self._groups))]
        return self._groups.setdefault(chain[min(len(chain), GROUP_BLOCKS) - 1], now)


class Line(Generic[W]):
    """All operations take O(log n) steps, but for `__iter__`."""

    def __init__(self) -> None:
        self.in_vain = False  # somebody has waited here as long as it might
        self._backlogs: dict[str, _Backlog[W]] = {}  # of tenants that have calls here
        self._turns: Ordered[tuple[float, int, _Backlog[W]]] = Ordered()
        self._now_at = 0.0  # the line's virtual time: that of the newest turn
        self._ahead: dict[str, float] = {}  # those of tenants without calls; gone with the line
        self._where: dict[W, tuple[_Backlog[W], Entry[W]]] = {}
        self._by_length: dict[int, dict[_Backlog[W], None]] = {}
        self._longest = 0
        self._joined = 0
        self._turns_at: deque[float] = deque(maxlen=PACE_TURNS)

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[W]:
        """Everybody, in no order."""
        return iter(self._where)

    def heads(self) -> Iterator[W]:
        """Who may be next, in order: the second only where the first may not go."""
        for _, _, backlog in islice(self._turns, HELD_LOOK_TENANTS):
            yield from (entry[3] for entry in islice(backlog.calls, HELD_LOOK_AT))

    @property
    def last(self) -> W:
        """Who gives way when there are too many."""
        backlog = next(reversed(self._by_length[self._longest]))  # of equal ones, that which has just become so long
        return backlog.calls.last[3]

    def join(self, waiter: W, since: float | None, now: float) -> None:
        """`since` is when its conversation began, where that is known and matters."""
        call, self._joined = waiter.call, self._joined + 1
        backlog = self._backlogs.get(call.tenant_name)
        if backlog is None:
            starts_at = max(self._ahead.pop(call.tenant_name, 0.0), self._now_at)
            backlog = self._backlogs[call.tenant_name] = _Backlog(call.tenant_name, starts_at, self._joined)
            self._turns.add(backlog.turn)
        if not call.may_be_held:
            entry: Entry[W] = (waiter.due, (), self._joined, waiter)
        else:
            chain = call.fingerprint
            if since is None:
                since = backlog.group_since(chain, now) if chain else now
            entry = (since, chain, self._joined, waiter)
        backlog.calls.add(entry)
        self._where[waiter] = backlog, entry
        self._note_length(backlog, before=len(backlog.calls) - 1)

    def leave(self, waiter: W) -> None:
        if (found := self._where.pop(waiter, None)) is None:
            return
        backlog, entry = found
        backlog.calls.remove(entry)
        self._note_length(backlog, before=len(backlog.calls) + 1)
        if not backlog.calls:
            del self._backlogs[backlog.tenant]
            self._turns.remove(backlog.turn)
            if backlog.turn[0] > self._now_at:
                self._ahead[backlog.tenant] = backlog.turn[0]

    def empty_in_seconds(self, now: float) -> float:
        """In which all that wait now would have their turns, as fast as the last ones came. Infinite where too few
        have come to tell."""
        turns = self._turns_at
        return math.inf if len(turns) < PACE_TURNS_MIN else len(self) * (now - turns[0]) / len(turns)

    def charge(self, call: Queued, now: float) -> None:
        """A call of this class has its turn, whether it has waited here or not: its tenant's next comes the later."""
        self._turns_at.append(now)
        tokens, backlog = max(1, call.tokens_estimate), self._backlogs.get(call.tenant_name)
        if backlog is None:
            self._ahead[call.tenant_name] = max(self._ahead.get(call.tenant_name, 0.0), self._now_at) + tokens
            return
        self._turns.remove(backlog.turn)
        self._now_at = max(self._now_at, backlog.turn[0])  # it is the later one where earlier tenants' calls are held
        backlog.turn = (self._now_at + tokens, backlog.turn[1], backlog)
        self._turns.add(backlog.turn)

    def _note_length(self, backlog: _Backlog[W], *, before: int) -> None:
        length = len(backlog.calls)
        if before:
            same = self._by_length[before]
            del same[backlog]
            if not same:
                del self._by_length[before]
        if length:
            self._by_length.setdefault(length, {})[backlog] = None
        if length > self._longest or self._longest not in self._by_length:
            self._longest = length  # it changes by one at a time
