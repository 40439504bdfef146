"""The queue of one latency class for one model: fair between tenants, and by deadline within a tenant.

    between tenants   Start-time fair queueing (Goyal, Vin and Cheng, 1996). Each tenant has a virtual time. Each of its
                      calls advances that time by the tokens that the call may use. The tenant with the lowest virtual
                      time is next. A tenant that joins starts at the queue's current virtual time, so it gets no slots
                      for the time in which it had no queued calls.
    in a hierarchy    Outermost tenants share the queue. The share of each is divided in the same way between its own
                      calls and its children, and so on. So an organisation with a hundred teams has one share.
    within a tenant   The call with the earliest timeout is next. If clients set no deadlines, that is the call that
                      arrived first. Calls that may be held back are ordered differently, so that cached prefixes are
                      used before they are evicted. The oldest conversation is next, or the oldest group of prompts
                      with a common beginning. Within a group, prompts with a longer common beginning stay together.

If a bound on queued calls is exceeded, the last call of the tenant with the most queued calls is shed: of the outermost
tenants the one with the most, and within it likewise. If one tenant queues a thousand calls, a single call of another
tenant is therefore neither shed nor delayed by all of them.
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

CANDIDATE_TENANTS = 4  # how many outermost tenants are considered for one slot, if the first ones' calls are held back
CANDIDATE_PARTS = 4  # how many tenants within one outermost tenant
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
    def tenant_path(self) -> Sequence[str]: ...  # its ancestors' names, the outermost first, and its own
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


class _Tenant(Generic[W]):
    """A tenant with its own queued calls and, as `parts`, the tenants below it.

    A tenant's own calls are one more part beside the tenants below it. Most tenants have none below, so `own` is the
    tenant itself until the first of them is found.
    """

    __slots__ = ("_groups", "calls", "debt", "length", "name", "own", "parts", "siblings", "turn")

    def __init__(self, name: str, siblings: _Parts[W]) -> None:
        self.name = name
        self.siblings = siblings  # the parts that it is one of
        self.length = 0  # queued calls, those of its parts included
        self.turn: tuple[float, int, _Tenant[W]] = (siblings.virtual_now, 0, self)  # (virtual time, number, self)
        self.calls: SortedList[Entry[W]] = SortedList()
        self.debt = 0.0  # without parts: virtual time of its own calls, from that of parts that would join now
        self.own: _Tenant[W] = self  # holds `calls`
        self.parts: _Parts[W] | None = None
        self._groups: dict[int, float] | None = None  # when each group began, by the hash of its last common block

    def divided(self) -> _Parts[W]:
        """Return its parts. The first time, makes its own calls one of them."""
        if self.parts is None:
            self.parts = _Parts(self)
            self.own = own = _Tenant("", self.parts)
            own.calls, own._groups, own.length = self.calls, self._groups, self.length
            own.turn = (self.debt, self.turn[1], own)
            if own.length:
                self.parts.turns.add(own.turn)
                self.parts.note_length(own, 0)
        return self.parts

    def group_since(self, chain: Sequence[int], now: float) -> float:
        """Return when the group of prompts that begin like `chain` was formed. Forms one if none accepts calls."""
        groups = self._groups
        if groups is None:
            groups = self._groups = {}
        while groups and now - next(iter(groups.values())) > GROUP_SECONDS:
            del groups[next(iter(groups))]
        return groups.setdefault(chain[min(len(chain), GROUP_BLOCKS) - 1], now)

    def resize(self, change: int, number: int) -> None:
        """Note that a call was added (1) to `own` or removed (-1). `number` orders those that join at the same time."""
        tenant: _Tenant[W] | None = self.own
        while tenant is not None:
            siblings, before = tenant.siblings, tenant.length
            tenant.length = before + change
            siblings.note_length(tenant, before)
            if not before:
                tenant.turn = (max(tenant.turn[0], siblings.virtual_now), number, tenant)
                siblings.turns.add(tenant.turn)
            elif not tenant.length:
                tenant._groups = None
                siblings.turns.remove(tenant.turn)
                if tenant.turn[0] <= siblings.virtual_now:
                    siblings.members.pop(tenant.name, None)  # its own calls are no member
            tenant = siblings.owner

    def charge(self, tokens: int) -> None:
        """Advance the virtual times of `own` and all above it by the tokens of a call that was granted a slot."""
        self.debt = tokens if self.length else self.debt + tokens
        tenant: _Tenant[W] | None = self.own
        while tenant is not None:
            siblings = tenant.siblings
            if tenant.length:
                siblings.turns.remove(tenant.turn)
                # The granted call's virtual time may be later than the queue's, if calls of earlier tenants are held.
                siblings.virtual_now = max(siblings.virtual_now, tenant.turn[0])
                tenant.turn = (siblings.virtual_now + tokens, tenant.turn[1], tenant)
                siblings.turns.add(tenant.turn)
            else:
                tenant.turn = (max(tenant.turn[0], siblings.virtual_now) + tokens, 0, tenant)
            tenant = siblings.owner


class _Parts(Generic[W]):
    """Tenants that share slots fairly: the outermost ones, or those below one tenant and its own calls."""

    __slots__ = ("_by_length", "_longest", "members", "owner", "turns", "virtual_now")

    def __init__(self, owner: _Tenant[W] | None) -> None:
        self.owner = owner
        self.members: dict[str, _Tenant[W]] = {}  # with queued calls, or a virtual time that was above `virtual_now`
        self.turns: SortedList[tuple[float, int, _Tenant[W]]] = SortedList()  # of those with queued calls
        self.virtual_now = 0.0  # that of the newest grant
        self._by_length: dict[int, dict[_Tenant[W], None]] = {}  # by queued calls; dicts as ordered sets
        self._longest = 0

    def candidates(self, breadth: int) -> Iterator[W]:
        """Yield the calls that may be next, in order, of at most `breadth` tenants."""
        for _, _, tenant in islice(self.turns, breadth):
            if tenant.parts is None:
                yield from (entry[3] for entry in islice(tenant.calls, CANDIDATES_PER_TENANT))
            else:
                yield from tenant.parts.candidates(CANDIDATE_PARTS)

    @property
    def fullest(self) -> _Tenant[W]:
        """Return the tenant with the most queued calls. In a tie, the newest to reach it."""
        return next(reversed(self._by_length[self._longest]))

    def note_length(self, tenant: _Tenant[W], before: int) -> None:
        """Move a tenant from the set for its former length to the set for its present length."""
        length = tenant.length
        if before:
            same = self._by_length[before]
            del same[tenant]
            if not same:
                del self._by_length[before]
        if length:
            self._by_length.setdefault(length, {})[tenant] = None
        if length > self._longest or self._longest not in self._by_length:
            self._longest = length  # right, because a length changes by one at a time


class FairQueue(Generic[W]):
    """The queued calls of one latency class and model. All operations take O(log n) steps, except `__iter__`."""

    def __init__(self) -> None:
        self.is_overloaded = False  # a call has timed out in this queue; an empty queue is discarded, so this ends then
        self._tenants: _Parts[W] = _Parts(None)  # the outermost ones
        self._where: dict[W, tuple[_Tenant[W], Entry[W], float]] = {}  # also when each was queued; oldest first
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
        return self._tenants.candidates(CANDIDATE_TENANTS)

    @property
    def next_to_shed(self) -> W:
        """Return the last call of the tenant with the most queued calls. In a tie, the newest to reach it is chosen."""
        tenant = self._tenants.fullest
        while tenant.parts is not None:
            tenant = tenant.parts.fullest
        return tenant.calls.last[3]

    def add(self, waiter: W, since: float | None, now: float) -> None:
        """Queue a call. `since` is when its conversation began, if that is known and determines the call's order."""
        call, self._added = waiter.call, self._added + 1
        tenant = self._tenant_of(call)
        if not call.may_be_held:
            entry: Entry[W] = (waiter.due, (), self._added, waiter)
        else:
            chain = call.fingerprint
            if since is None:
                since = tenant.own.group_since(chain, now) if chain else now
            entry = (since, chain, self._added, waiter)
        tenant.calls.add(entry)
        self._where[waiter] = tenant, entry, now
        tenant.resize(1, self._added)

    def remove(self, waiter: W) -> None:
        """Remove a call. Does nothing if the call is not queued."""
        if (found := self._where.pop(waiter, None)) is None:
            return
        tenant, entry, _ = found
        tenant.calls.remove(entry)
        tenant.resize(-1, 0)

    def drain_seconds(self, now: float) -> float:
        """Estimate in how many seconds all calls queued now have a slot, at the pace of the newest grants.

        Infinite if there were fewer than `PACE_TURNS_MIN` grants.
        """
        turns = self._turns_at
        return math.inf if len(turns) < PACE_TURNS_MIN else len(self) * (now - turns[0]) / len(turns)

    def charge(self, call: QueueableCall, now: float) -> None:
        """Charge a granted slot of this class to the call's tenant, whether the call was queued here or not."""
        self._turns_at.append(now)
        self._tenant_of(call).charge(max(1, call.tokens_estimate))

    def _tenant_of(self, call: QueueableCall) -> _Tenant[W]:
        siblings, found = self._tenants, None
        for name in call.tenant_path:
            if found is not None:
                siblings = found.divided()
            found = siblings.members.get(name)
            if found is None:
                found = siblings.members[name] = _Tenant(name, siblings)
        assert found is not None
        return found
