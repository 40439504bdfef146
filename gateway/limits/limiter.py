"""Phase 4: a call reserves the most it may use of every limit it falls under, or of none; afterwards it pays the truth.

A reservation is a lease in shared storage. `Limiter` keeps the leases of long calls alive, and settles later what could
not be settled at once; whatever it can not do, the end of the lease does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, StorageUnavailable
from gateway.limits.base import Estimate, Limit, Rates, dearest_cost_nanos, estimate_of, rates_of
from gateway.limits.budget import Budget
from gateway.limits.concurrency import Concurrency
from gateway.limits.headers import HeaderGroup, header_groups, tightest_headers
from gateway.limits.scope import scopes_of_call, tenant_prefix
from gateway.limits.stream_budget import StreamBudget
from gateway.policy import Limits, Policy, Tenant
from gateway.storage.base import Charge, Grant, Rejection, ReservationStore, SpendCharge
from gateway.types import Call, Usage

LEASE_SECONDS = 30.0  # after a crash without return, places and money are held so long
EXTEND_SECONDS = LEASE_SECONDS / 3
RETRY_SECONDS = 1.0
MAX_UNSETTLED = 10_000
MAX_AT_ONCE = 128  # background operations under way at the same time, so that calls come between
MAX_PLANS = 10_000

log = logging.getLogger(__name__)


class Reservation:
    """What an admitted call holds. Ended by the first `settle` or `release`; whatever comes later changes nothing.

    None of them raises, and none waits longer than a storage operation may take. A cancelled end is made up for.
    `stream_budget` is None where no budget may cut the answer.
    """

    __slots__ = ("_charges", "_ended", "_holds_slot", "_limiter", "_limits", "_name", "headers", "stream_budget")

    def __init__(
        self,
        limiter: Limiter | None,
        name: str,
        limits: Sequence[Limit[Any]],
        headers: Mapping[str, str],
        *,
        charges: Sequence[Charge] = (),
        holds_slot: bool = False,
        stream_budget: StreamBudget | None = None,
    ) -> None:
        self.headers = headers  # for the reply
        self.stream_budget = stream_budget
        self._limiter = limiter  # None: there is nothing to give back
        self._name = name
        self._limits = limits
        self._charges = charges
        self._holds_slot = holds_slot
        self._ended = False

    async def release_slot(self) -> None:
        """The work is over: its place is free for the next call, although its bill is not settled yet."""
        if self._holds_slot and not self._ended and self._limiter is not None:
            self._holds_slot = False
            await self._limiter.release_slot(self._name)

    async def settle(self, usage: Usage, cost_nanos: int) -> None:
        if not self._ended and self._limiter is not None:
            self._ended = True
            try:
                actual = [limit.actual(usage, cost_nanos) for limit in self._limits]
                await self._limiter.end(self._name, actual, self._charges)
            finally:
                if self.stream_budget is not None:
                    await self.stream_budget.end()

    async def release(self) -> None:
        """Nothing was used; that the call was made still counts as a request."""
        await self.settle(Usage(), 0)


UNLIMITED = Reservation(None, "", (), {})
"""Of a call that no limit applies to; shared by all of them."""


class _LimitSet(msgspec.Struct, frozen=True):
    """The limits that calls of one tenant, key, model and class fall under."""

    tenant: Tenant  # of whom it was made
    key_limits: Limits | None
    names_begin: str  # of reservations
    limits: tuple[Limit[Any], ...]
    rates: Rates
    shown: tuple[HeaderGroup, ...]
    holds_slot: bool
    budgets: tuple[Budget, ...]
    cutting: tuple[Budget, ...]  # those that may cut a stream


class Limiter:
    """Start and stop it with the application. The numbers are for telemetry."""

    def __init__(
        self, counters: ReservationStore, family: Sequence[type[Limit[Any]]], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._counters = counters
        self._family = family
        self._clock = clock
        self._planned_for: Policy | None = None
        self._plans: dict[tuple[str, str, str], _LimitSet] = {}  # by key, model and class
        self._open: dict[str, float] = {}  # when each open reservation was made or last extended
        self._unsettled: dict[str, Sequence[int]] = {}  # oldest first
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.leases_lost = 0  # ran out while their calls went on: the store was away too long
        self.settlements_dropped = 0  # left to the end of their leases: the store was away far too long
        self.store_failures = 0
        self._is_refusing = False  # since the store is away

    @property
    def open_reservations(self) -> int:
        return len(self._open)

    @property
    def unsettled(self) -> int:
        """Reservations that ended and wait for the store to be told."""
        return len(self._unsettled)

    async def start(self) -> None:
        if self._keeper is None:
            self._stopping.clear()
            self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Tries once more to settle what is left."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._stopping.set()
            await keeper
            await self.retry_unsettled()

    async def admit(self, call: Call) -> Reservation:
        """Raises LimitReached, BudgetSpent, BadRequest for a call that could never fit, or StorageUnavailable."""
        plan = self._plan_of(call)
        limits = plan.limits
        if not limits:
            return UNLIMITED
        now = self._clock()
        estimate = estimate_of(call, now, rates=plan.rates)
        charges = [limit.charge(estimate) for limit in limits]
        name = plan.names_begin + call.id
        verdict = await self._reserve(name, charges, now)
        if isinstance(verdict, Rejection):
            raise _refusal(limits, charges, verdict)
        return Reservation(
            self,
            name,
            limits,
            tightest_headers(plan.shown, charges, verdict.remaining),
            charges=charges,
            holds_slot=plan.holds_slot,
            stream_budget=(
                self._stream_budget(call, plan.cutting, name, estimate) if plan.cutting and call.stream else None
            ),
        )

    async def admit_cache_hit(self, call: Call) -> Reservation:
        """Of a call that the response cache answers: it may cost money, and nothing else. Raises as `admit` does."""
        prices, plan = call.policy.cache_prices.get(call.model.name), self._plan_of(call)
        if prices is None or not (budgets := plan.budgets):
            return UNLIMITED
        now = self._clock()
        estimate = estimate_of(call, now, rates=rates_of(prices.prices))
        charges = [budget.charge(estimate) for budget in budgets]
        name = f"{plan.names_begin}{call.id}+hit"  # the call may yet have to ask for itself
        verdict = await self._reserve(name, charges, now)
        if isinstance(verdict, Rejection):
            raise _refusal(budgets, charges, verdict)
        return Reservation(self, name, budgets, {}, charges=charges)

    async def charge_orphaned(self, call: Call, usage: Usage, cost_nanos: int, *, admitted: float) -> None:
        """A killed gateway's call is over, and its bill is known: settle its reservation, where the store has it still.
        Where it has not, take the cost from the budgets of the period in which it was admitted (seconds since the
        epoch), be it there or not. Raises `StorageUnavailable`.
        """
        plan, now = self._plan_of(call), self._clock()
        name = plan.names_begin + call.id
        settled = await self.settle_orphaned(call, usage, cost_nanos)
        if settled is None:
            name += "+lost"
        if plan.budgets and not settled:
            charges = [budget.charge_for(cost_nanos, admitted) for budget in plan.budgets]
            await self._counters.force_reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
            await self._counters.settle(name, [cost_nanos] * len(charges), now=now)

    async def settle_orphaned(self, call: Call, usage: Usage, cost_nanos: int) -> bool | None:
        """Settle what a killed gateway has left reserved for a call. False: the store knows of nothing to settle; None:
        it was made under other limits, and ends with its lease. Raises `StorageUnavailable`.
        """
        plan = self._plan_of(call)
        actual = [limit.actual(usage, cost_nanos) for limit in plan.limits]
        try:
            return bool(actual) and await self._counters.settle(plan.names_begin + call.id, actual, now=self._clock())
        except ValueError:
            return None

    async def _reserve(self, name: str, charges: Sequence[Charge], now: float) -> Grant | Rejection:
        """What is granted is kept alive from here on."""
        try:
            verdict = await self._counters.reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
        except (StorageUnavailable, asyncio.CancelledError) as error:
            # It may have been reserved without our hearing of it.
            self._put_off(name, [0] * len(charges))
            if isinstance(error, StorageUnavailable):
                self.store_failures += 1
                if not self._is_refusing:
                    log.error("calls that have limits are refused: %s", error.message)
                self._is_refusing = True
            raise
        if self._is_refusing:
            self._is_refusing = False
            log.warning("the storage answers again: calls that have limits are taken")
        if isinstance(verdict, Grant):
            self._open[name] = now
        return verdict

    def _plan_of(self, call: Call) -> _LimitSet:
        principal = call.principal
        if call.policy is not self._planned_for or len(self._plans) >= MAX_PLANS:
            self._planned_for = call.policy
            self._plans.clear()
        which = (principal.key_id, call.model.name, call.class_name)
        plan = self._plans.get(which)
        if plan is None or plan.tenant is not principal.tenant or plan.key_limits is not principal.limits:
            plan = self._plans[which] = self._make_plan(call)
        return plan

    def _make_plan(self, call: Call) -> _LimitSet:
        principal = call.principal
        scopes = scopes_of_call(principal.tenant, principal.key_id, principal.limits, call.model, call.class_name)
        found = [kind.of(limits, scope) for scope, limits in scopes for kind in self._family]
        limits = tuple(limit for limit in found if limit is not None)
        return _LimitSet(
            principal.tenant,
            principal.limits,
            f"{tenant_prefix(principal.tenant.name)}/",
            limits,
            rates_of(call.policy.prices_by_model.get(call.model.name, ())),  # of one that is over, it may be gone
            header_groups([limit.header_kind for limit in limits]),
            any(isinstance(limit, Concurrency) for limit in limits),
            budgets := tuple(limit for limit in limits if isinstance(limit, Budget)),
            tuple(budget for budget in budgets if budget.cuts_streams),
        )

    def _stream_budget(self, call: Call, budgets: Sequence[Budget], name: str, estimate: Estimate) -> StreamBudget:
        """More money for a stream is a reservation of its own, which holds it until the stream's end."""

        async def reserve(number: int, nanos: int) -> Grant | Rejection:
            charges = [budget.charge_for(nanos, estimate.now) for budget in budgets]
            return await self._reserve(f"{name}+{number}", charges, self._clock())

        def give_back(number: int) -> None:
            self._open.pop(f"{name}+{number}", None)
            self._put_off(f"{name}+{number}", [0] * len(budgets))

        rates = self._plan_of(call).rates
        a_slice = dearest_cost_nanos(rates, 0, call.principal.tenant.limits.default_output_tokens)
        return StreamBudget(estimate.cost_nanos, a_slice, reserve, give_back, budgets)

    async def release_slot(self, name: str) -> None:
        """For `Reservation.leave`."""
        try:
            await self._counters.release_slots(name, now=self._clock())
        except StorageUnavailable:  # settling frees it
            self.store_failures += 1

    async def end(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        """For `Reservation.settle`."""
        self._open.pop(name, None)
        try:
            settled = await self._counters.settle(name, actual, now=self._clock())
        except StorageUnavailable:
            self.store_failures += 1
            self._put_off(name, actual)
        except asyncio.CancelledError:
            self._put_off(name, actual)  # the store settles it once, however often it is asked
            raise
        else:
            if not settled:
                await self._charge_forgotten(name, actual, charges)

    async def _charge_forgotten(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        """The store has forgotten the reservation, as where this process stood still for hours or the clock was set
        ahead. What the call cost counts all the same.
        """
        both = zip(charges, actual, strict=True)
        spent = [(charge, amount) for charge, amount in both if isinstance(charge, SpendCharge) and amount]
        if not spent:
            return
        name, now = f"{name}+lost", self._clock()
        try:
            await self._counters.force_reserve(
                name, [charge for charge, _ in spent], lease_seconds=LEASE_SECONDS, now=now
            )
            await self._counters.settle(name, [amount for _, amount in spent], now=now)
        except StorageUnavailable:
            self.store_failures += 1

    def _put_off(self, name: str, actual: Sequence[int]) -> None:
        if len(self._unsettled) == MAX_UNSETTLED:
            self._unsettled.pop(next(iter(self._unsettled)))
            self.settlements_dropped += 1
        self._unsettled[name] = actual

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
            await self.retry_unsettled()
            await self.extend_due()

    async def retry_unsettled(self) -> None:
        """Until all are settled, or the store is away."""
        while self._unsettled:
            some = list(islice(self._unsettled.items(), MAX_AT_ONCE))
            now = self._clock()
            ended = await self._all([partial(self._counters.settle, name, actual, now=now) for name, actual in some])
            for (name, _), answer in zip(some, ended, strict=True):
                if answer is not None:
                    self._unsettled.pop(name, None)
            if None in ended:
                return

    async def extend_due(self) -> None:
        """Keep alive what has been open for a third of its lease; the other two are for trying again. And all that was
        extended by a clock that was set back since.
        """
        now = self._clock()
        due = [name for name, since in self._open.items() if now >= since + EXTEND_SECONDS or now < since]
        for start in range(0, len(due), MAX_AT_ONCE):
            some = due[start : start + MAX_AT_ONCE]
            extend = partial(self._counters.extend_lease, lease_seconds=LEASE_SECONDS, now=now)
            held = await self._all([partial(extend, name) for name in some])
            for name, answer in zip(some, held, strict=True):
                if answer and name in self._open:
                    self._open[name] = now
                elif answer is False and self._open.pop(name, None) is not None:
                    self.leases_lost += 1
            if not any(answer is not None for answer in held):
                return

    async def _all(self, operations: Sequence[Callable[[], Awaitable[bool]]]) -> list[bool | None]:
        """The answers of the store, None where it was away."""
        answers = await asyncio.gather(*(_unless_away(operation) for operation in operations))
        self.store_failures += answers.count(None)
        return answers


def _refusal(limits: Sequence[Limit[Any]], charges: Sequence[Charge], refused: Rejection) -> GatewayError:
    return limits[refused.index].refuse(charges[refused.index], refused)


async def _unless_away(operation: Callable[[], Awaitable[bool]]) -> bool | None:
    try:
        return await operation()
    except StorageUnavailable:
        return None
