"""The queue of one latency class for one model: fair between tenants, and by deadline within a tenant.

    between tenants   Start-time fair queueing (Goyal, Vin and Cheng, 1996). Each tenant has a virtual time. Each of its
                      calls advances that time by the tokens that the call may use. The tenant with the lowest virtual
                      time is next. A tenant that joins starts at the queue's current virtual time, so it gets no slots
                      for the time in which it had no queued calls.
    within a tenant   The call with the earliest timeout is next. If clients set no deadlines, that is the call that
                      arrived first. Calls that may be held back are ordered differently, so that cached prefixes are
                      used before they are evicted. The oldest conversation is next, or the oldest group of prompts
                      with a common beginning. Within a group, prompts with a longer common beginning stay together.

If a bound on queued calls is exceeded, the last call of the tenant with the most queued calls is shed. If one tenant
queues a thousand calls, a single call of another tenant is therefore neither shed nor delayed by all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from gateway.core.errors import GatewayError
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import LatencyClass, Model
from gateway.prefix.working_set import RoutedPrompt
from gateway.queueing.sorted_list import SortedList

CANDIDATE_TENANTS = 4  # how many tenants are considered for one slot, if the calls of the first ones are held back
CANDIDATES_PER_TENANT = 4  # how many calls per tenant are considered for one slot, if the first ones are held back
PACE_TURNS = 32  # number of newest grants from which the queue's pace is computed
PACE_TURNS_MIN = 4  # with fewer grants than that, the pace is unknown
GROUP_BLOCKS = 16  # calls are grouped by this many blocks at the beginning of their prompts
GROUP_SECONDS = 60.0  # how long a group accepts calls; later calls start a new, younger group


class QueueableCall(RoutedPrompt, Protocol):
    """The fields of a call that the queue reads. `gateway.types.Call` and the simulator's calls have these fields."""

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
    """A queued call and its caller. The code that removes it then grants or rejects it, unless it is `done`."""

    @property
    def call(self) -> QueueableCall: ...
    @property
    def due(self) -> float: ...  # when the wait times out, in the clock of `now`
    @property
    def done(self) -> bool: ...  # granted, rejected, or its caller has stopped waiting
    def grant(self, permit: SlotPermit) -> None: ...
    def reject(self, error: GatewayError) -> None: ...


W = TypeVar("W", bound=Waiter)
Entry = tuple[float, Sequence[int], int, W]
"""(timeout, or the time at which its group began; its fingerprint, if that orders it; a unique number; the waiter)."""


class _TenantBacklog(Generic[W]):
    """One tenant's queued calls. `turn` is the tenant's sort entry among the tenants: (virtual time, number, self)."""

    __slots__ = ("_groups", "calls", "tenant", "turn")

    def __init__(self, tenant: str, starts_at: float, number: int) -> None:
        self.tenant = tenant
        self.turn = (starts_at, number, self)
        self.calls: SortedList[Entry[W]] = SortedList()
        self._groups: dict[int, float] = {}  # when each group began, by the hash of its last common block

    def group_since(self, chain: Sequence[int], now: float) -> float:
        """Return when the group of prompts that begin like `chain` was formed. Forms one if none accepts calls."""
        while self._groups and now - next(iter(self._groups.values())) > GROUP_SECONDS:
            del self._groups[next(iter(self._groups))]
        return self._groups.setdefault(chain[min(len(chain), GROUP_BLOCKS) - 1], now)


class FairQueue(Generic[W]):
    """The queued calls of one latency class and model. All operations take O(log n) steps, except `__iter__`."""

    def __init__(self) -> None:
        self.is_overloaded = False  # a call has timed out in this queue; an empty queue is discarded, so this ends then
        self._backlogs: dict[str, _TenantBacklog[W]] = {}  # of tenants with queued calls
        self._turns: SortedList[tuple[float, int, _TenantBacklog[W]]] = SortedList()
        self._virtual_now = 0.0  # the queue's virtual time: that of the newest grant
        self._ahead: dict[str, float] = {}  # virtual times above the queue's, of tenants without queued calls
        self._where: dict[W, tuple[_TenantBacklog[W], Entry[W], float]] = {}  # also when each was queued; oldest first
        self._by_length: dict[int, dict[_TenantBacklog[W], None]] = {}  # dicts as ordered sets
        self._longest = 0
        self._added = 0
        self._turns_at: deque[float] = deque(maxlen=PACE_TURNS)

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[W]:
        """Iterate over all queued calls, in no particular order."""
        return iter(self._where)

    @property
    def oldest(self) -> W:
        """Return the call that has waited longest. The queue must not be empty."""
        return next(iter(self._where))

    @property
    def oldest_at(self) -> float:
        """Return when the call that has waited longest was queued. The queue must not be empty."""
        return next(iter(self._where.values()))[2]

    def queued_at(self, waiter: W) -> float:
        """Return when a queued call was queued."""
        return self._where[waiter][2]

    def candidates(self) -> Iterator[W]:
        """Yield the calls that may be next, in order. A call gets a slot only if the ones before it are held back."""
        for _, _, backlog in islice(self._turns, CANDIDATE_TENANTS):
            yield from (entry[3] for entry in islice(backlog.calls, CANDIDATES_PER_TENANT))

    @property
    def next_to_shed(self) -> W:
        """Return the last call of the tenant with the most queued calls. In a tie, the newest to reach it is chosen."""
        backlog = next(reversed(self._by_length[self._longest]))
        return backlog.calls.last[3]

    def add(self, waiter: W, since: float | None, now: float) -> None:
        """Queue a call. `since` is when its conversation began, if that is known and determines the call's order."""
        call, self._added = waiter.call, self._added + 1
        backlog = self._backlogs.get(call.tenant_name)
        if backlog is None:
            starts_at = max(self._ahead.pop(call.tenant_name, 0.0), self._virtual_now)
            backlog = self._backlogs[call.tenant_name] = _TenantBacklog(call.tenant_name, starts_at, self._added)
            self._turns.add(backlog.turn)
        if not call.may_be_held:
            entry: Entry[W] = (waiter.due, (), self._added, waiter)
        else:
            chain = call.fingerprint
            if since is None:
                since = backlog.group_since(chain, now) if chain else now
            entry = (since, chain, self._added, waiter)
        backlog.calls.add(entry)
        self._where[waiter] = backlog, entry, now
        self._note_length(backlog, before=len(backlog.calls) - 1)

    def remove(self, waiter: W) -> None:
        """Remove a call. Does nothing if the call is not queued."""
        if (found := self._where.pop(waiter, None)) is None:
            return
        backlog, entry, _ = found
        backlog.calls.remove(entry)
        self._note_length(backlog, before=len(backlog.calls) + 1)
        if not backlog.calls:
            del self._backlogs[backlog.tenant]
            self._turns.remove(backlog.turn)
            if backlog.turn[0] > self._virtual_now:
                self._ahead[backlog.tenant] = backlog.turn[0]

    def drain_seconds(self, now: float) -> float:
        """Estimate in how many seconds all calls queued now have a slot, at the pace of the newest grants.

        Infinite if there were fewer than `PACE_TURNS_MIN` grants.
        """
        turns = self._turns_at
        return math.inf if len(turns) < PACE_TURNS_MIN else len(self) * (now - turns[0]) / len(turns)

    def charge(self, call: QueueableCall, now: float) -> None:
        """Charge a granted slot of this class to the call's tenant, whether the call was queued here or not."""
        self._turns_at.append(now)
        tokens, backlog = max(1, call.tokens_estimate), self._backlogs.get(call.tenant_name)
        if backlog is None:
            self._ahead[call.tenant_name] = max(self._ahead.get(call.tenant_name, 0.0), self._virtual_now) + tokens
            return
        self._turns.remove(backlog.turn)
        # The granted call's virtual time may be later than the queue's, if calls of earlier tenants are held back.
        self._virtual_now = max(self._virtual_now, backlog.turn[0])
        backlog.turn = (self._virtual_now + tokens, backlog.turn[1], backlog)
        self._turns.add(backlog.turn)

    def _note_length(self, backlog: _TenantBacklog[W], *, before: int) -> None:
        """Move a backlog from the set for its former length to the set for its present length."""
        length = len(backlog.calls)
        if before:
            same = self._by_length[before]
            del same[backlog]
            if not same:
                del self._by_length[before]
        if length:
            self._by_length.setdefault(length, {})[backlog] = None
        if length > self._longest or self._longest not in self._by_length:
            self._longest = length  # right, because a length changes by one at a time
