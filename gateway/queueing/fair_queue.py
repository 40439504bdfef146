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


class _Node(Generic[W]):
    """A tenant in the tree of tenants, or, as `_Backlog`, the calls of one tenant itself.

    `turn` is its sort entry among the children of its parent: (virtual time, number, self). It is in the parent's
    `turns` while calls are queued in it.
    """

    __slots__ = ("_by_length", "_longest", "children", "length", "name", "parent", "turn", "turns", "virtual_now")

    def __init__(self, name: str, parent: _Node[W] | None, starts_at: float) -> None:
        self.name = name
        self.parent = parent
        self.length = 0  # queued calls of it and its children
        self.turn: tuple[float, int, _Node[W]] = (starts_at, 0, self)
        self.children: dict[str, _Node[W]] = {}  # those with queued calls, or with a virtual time above `virtual_now`
        self.turns: SortedList[tuple[float, int, _Node[W]]] = SortedList()  # of the children with queued calls
        self.virtual_now = 0.0  # virtual time of its children: that of the newest grant
        self._by_length: dict[int, dict[_Node[W], None]] = {}  # children by queued calls; dicts as ordered sets
        self._longest = 0

    def child(self, name: str) -> _Node[W]:
        """Return a child, which is made if there is none."""
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = _Node(name, self, self.virtual_now)
        return found

    def backlog(self) -> _Backlog[W]:
        """Return the calls of this tenant itself, which are a child beside those of the tenants below it."""
        found = self.children.get("")
        if found is None:
            found = self.children[""] = _Backlog("", self, self.virtual_now)
        assert isinstance(found, _Backlog)
        return found

    def resize(self, change: int, number: int) -> None:
        """Note that a call was added (1) or removed (-1) here. `number` orders those that join at the same time."""
        node, parent = self, self.parent
        while parent is not None:
            before = node.length
            node.length = before + change
            parent._note_length(node, before)
            if not before:
                node.turn = (max(node.turn[0], parent.virtual_now), number, node)
                parent.turns.add(node.turn)
            elif not node.length:
                parent.turns.remove(node.turn)
                if node.turn[0] <= parent.virtual_now:
                    del parent.children[node.name]
            node, parent = parent, parent.parent
        node.length += change

    def charge(self, tokens: int) -> None:
        """Advance the virtual times of this node and its ancestors by the tokens of a call that was granted a slot."""
        node, parent = self, self.parent
        while parent is not None:
            if node.length:
                parent.turns.remove(node.turn)
                # The granted call's virtual time may be later than the queue's, if calls of earlier tenants are held.
                parent.virtual_now = max(parent.virtual_now, node.turn[0])
                node.turn = (parent.virtual_now + tokens, node.turn[1], node)
                parent.turns.add(node.turn)
            else:
                node.turn = (max(node.turn[0], parent.virtual_now) + tokens, 0, node)
            node, parent = parent, parent.parent

    @property
    def fullest(self) -> _Node[W]:
        """Return the child with the most queued calls. In a tie, the newest to reach it."""
        return next(reversed(self._by_length[self._longest]))

    def candidates(self, breadth: int) -> Iterator[W]:
        """Yield the calls that may be next, in order, of at most `breadth` children."""
        for _, _, node in islice(self.turns, breadth):
            yield from node.candidates(CANDIDATE_PARTS)

    def _note_length(self, child: _Node[W], before: int) -> None:
        """Move a child from the set for its former length to the set for its present length."""
        length = child.length
        if before:
            same = self._by_length[before]
            del same[child]
            if not same:
                del self._by_length[before]
        if length:
            self._by_length.setdefault(length, {})[child] = None
        if length > self._longest or self._longest not in self._by_length:
            self._longest = length  # right, because a length changes by one at a time


class _Backlog(_Node[W]):
    """The queued calls of one tenant itself."""

    __slots__ = ("_groups", "calls")

    def __init__(self, name: str, parent: _Node[W] | None, starts_at: float) -> None:
        super().__init__(name, parent, starts_at)
        self.calls: SortedList[Entry[W]] = SortedList()
        self._groups: dict[int, float] = {}  # when each group began, by the hash of its last common block

    def group_since(self, chain: Sequence[int], now: float) -> float:
        """Return when the group of prompts that begin like `chain` was formed. Forms one if none accepts calls."""
        while self._groups and now - next(iter(self._groups.values())) > GROUP_SECONDS:
            del self._groups[next(iter(self._groups))]
        return self._groups.setdefault(chain[min(len(chain), GROUP_BLOCKS) - 1], now)

    def candidates(self, breadth: int) -> Iterator[W]:
        """Yield its first calls."""
        return (entry[3] for entry in islice(self.calls, CANDIDATES_PER_TENANT))


class FairQueue(Generic[W]):
    """The queued calls of one latency class and model. All operations take O(log n) steps, except `__iter__`."""

    def __init__(self) -> None:
        self.is_overloaded = False  # a call has timed out in this queue; an empty queue is discarded, so this ends then
        self._tenants: _Node[W] = _Node("", None, 0.0)  # the tree of tenants
        self._where: dict[W, tuple[_Backlog[W], Entry[W], float]] = {}  # also when each was queued; oldest first
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
        node = self._tenants.fullest
        while not isinstance(node, _Backlog):
            node = node.fullest
        last: Entry[W] = node.calls.last
        return last[3]

    def add(self, waiter: W, since: float | None, now: float) -> None:
        """Queue a call. `since` is when its conversation began, if that is known and determines the call's order."""
        call, self._added = waiter.call, self._added + 1
        backlog = self._backlog_of(call)
        if not call.may_be_held:
            entry: Entry[W] = (waiter.due, (), self._added, waiter)
        else:
            chain = call.fingerprint
            if since is None:
                since = backlog.group_since(chain, now) if chain else now
            entry = (since, chain, self._added, waiter)
        backlog.calls.add(entry)
        self._where[waiter] = backlog, entry, now
        backlog.resize(1, self._added)

    def remove(self, waiter: W) -> None:
        """Remove a call. Does nothing if the call is not queued."""
        if (found := self._where.pop(waiter, None)) is None:
            return
        backlog, entry, _ = found
        backlog.calls.remove(entry)
        backlog.resize(-1, 0)

    def drain_seconds(self, now: float) -> float:
        """Estimate in how many seconds all calls queued now have a slot, at the pace of the newest grants.

        Infinite if there were fewer than `PACE_TURNS_MIN` grants.
        """
        turns = self._turns_at
        return math.inf if len(turns) < PACE_TURNS_MIN else len(self) * (now - turns[0]) / len(turns)

    def charge(self, call: QueueableCall, now: float) -> None:
        """Charge a granted slot of this class to the call's tenant, whether the call was queued here or not."""
        self._turns_at.append(now)
        self._backlog_of(call).charge(max(1, call.tokens_estimate))

    def _backlog_of(self, call: QueueableCall) -> _Backlog[W]:
        node = self._tenants
        for name in call.tenant_path:
            node = node.child(name)
        return node.backlog()
