"""Phase 4: the limiter reserves the most that a call may use of all of its limits, and later settles the actual usage.

`Limiter.admit` looks up the limits that apply to the call (`applicable.py`), and estimates the most that the call may
use. It reserves all charges or none, in one atomic storage operation. The result is a `Reservation`, which is a lease
in the shared storage. A background task extends the leases of long calls, and retries settlements that failed. If a
lease is not extended, for example because its gateway died, it expires, and the reserved amounts become available.

If the storage is shared, most calls are admitted from leased slices (`slices.py`), without a storage operation.
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

from gateway.core.errors import GatewayError, StorageUnavailable
from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.limits.applicable import ApplicableLimitsCache
from gateway.limits.base import CallEstimate, Limit, estimate_call, highest_cost_nanos, highest_prices
from gateway.limits.budget import BudgetLimit
from gateway.limits.headers import tightest_headers
from gateway.limits.slices import Slices
from gateway.limits.stream_budget import StreamBudget
from gateway.storage.base import Charge, Grant, Rejection, ReservationStore, SpendCharge
from gateway.types import Call, Usage

LEASE_SECONDS = 30.0  # how long slots and money stay reserved after a gateway died
EXTEND_SECONDS = LEASE_SECONDS / 3
RETRY_SECONDS = 1.0  # between two rounds of the background task
MAX_UNSETTLED = 10_000
MAX_CONCURRENT_OPERATIONS = 128  # started by the background task; bounded so that calls' own operations are not delayed

log = logging.getLogger(__name__)


class Reservation:
    """The amounts that an admitted call has reserved. The first `settle` or `release` ends the reservation.

    Later calls of `settle` and `release` do nothing. No method raises an error or waits longer than one storage
    operation may take. If `settle` or `release` is cancelled, the limiter completes the operation in the background.
    `stream_budget` is None if no budget may cut the answer.
    """

    __slots__ = (
        "_charges", "_ended", "_holds_slot", "_limiter", "_limits", "_name", "headers", "is_billed", "is_leased",
        "stream_budget",
    )  # fmt: skip

    def __init__(
        self,
        limiter: Limiter | None,
        name: str,
        limits: Sequence[Limit[Any]],
        headers: Mapping[str, str],
        *,
        charges: Sequence[Charge] = (),
        holds_slot: bool = False,
        is_leased: bool = False,
        stream_budget: StreamBudget | None = None,
    ) -> None:
        self.is_leased = is_leased  # whether the charges were taken from slices, as the receipt must say
        self.is_billed = False  # whether only the slot is left to be released
        self.headers = headers  # for the reply
        self.stream_budget = stream_budget
        self._limiter = limiter  # None if nothing is reserved
        self._name = name
        self._limits = limits
        self._charges = charges
        self._holds_slot = holds_slot
        self._ended = False

    def bill(self, usage: Usage, cost_nanos: int, receipt: str) -> None:
        """Replace amounts that were taken from slices by the actual usage, right after the receipt was written.

        `receipt` is the receipt's event id. Does nothing if the reservation is in the storage: it is then settled when
        the receipt is durable.
        """
        if self.is_leased and not self._ended and self._limiter is not None:
            self.is_billed = True
            self._limiter.bill(self._name, [limit.actual(usage, cost_nanos) for limit in self._limits], receipt)

    async def release_slot(self) -> None:
        """Free the concurrency slot of a call that has ended, before the call is settled."""
        if self._holds_slot and not self._ended and self._limiter is not None:
            self._holds_slot = False
            await self._limiter.release_slot(self._name)

    async def settle(self, usage: Usage, cost_nanos: int) -> None:
        """Replace the reserved amounts with the actual usage and cost, and end the reservation."""
        if not self._ended and self._limiter is not None:
            self._ended = True
            try:
                if not self.is_billed:
                    actual = [limit.actual(usage, cost_nanos) for limit in self._limits]
                    await self._limiter.end(self._name, actual, self._charges)
                elif self._holds_slot:
                    await self._limiter.release_slot(self._name)
            finally:
                self._limiter.forget(self._name)
                if self.stream_budget is not None:
                    await self.stream_budget.end()

    async def release(self) -> None:
        """End the reservation of a call that used nothing. The call still counts as a request."""
        await self.settle(Usage(), 0)


UNLIMITED = Reservation(None, "", (), {})
"""The shared reservation of all calls to which no limit applies."""


class Limiter:
    """Reserves and settles the limits of calls. Start and stop it with the application.

    `slices` stand before `store`, if they are given. All methods must be called on one event loop. The public counters
    count since the start; telemetry reads them.
    """

    def __init__(
        self,
        store: ReservationStore,
        family: Sequence[type[Limit[Any]]],
        *,
        slices: Slices | None = None,
        clock: Callable[[], float] = time.time,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._store = slices or store
        self._slices = slices
        self._applicable = ApplicableLimitsCache(family)
        self._clock = clock
        self._open: dict[str, float] = {}  # when each reservation was made or last extended, by its id
        self._unsettled: dict[str, Sequence[int]] = {}  # actual amounts by reservation id, oldest first
        self._supervisor = supervisor or Supervisor()
        self._background: SupervisedTask | None = None
        self._stopping = asyncio.Event()
        self.leases_lost = 0  # expired while their calls ran, because the storage was unreachable for too long
        self.settlements_dropped = 0  # beyond MAX_UNSETTLED, or failed by a bug: their leases expire instead
        self.storage_failures = 0
        self._is_rejecting = False  # because the storage is unreachable; logged once

    @property
    def open_reservations(self) -> int:
        """The number of reservations of calls that are still running."""
        return len(self._open) + (self._slices.call_count if self._slices is not None else 0)

    @property
    def unsettled(self) -> int:
        """The number of ended calls whose usage is not in the storage yet."""
        return len(self._unsettled) + (self._slices.unreported if self._slices is not None else 0)

    async def start(self) -> None:
        """Start the background task."""
        if self._background is None:
            self._stopping.clear()
            self._background = self._supervisor.start("limits", self._run, essential=True)

    async def stop(self) -> None:
        """Stop the background task, and try once to settle the unsettled reservations."""
        background, self._background = self._background, None
        if background is not None:
            self._stopping.set()
            await background.join()
            await self.retry_unsettled()

    async def admit(self, call: Call, *, from_slices: bool = True) -> Reservation:
        """Reserve all limits of a call, or none.

        With `from_slices`, the receipt must be written to this gateway's ledger when the call ends, before `bill`.
        Raises `LimitReached`, `BudgetSpent`, `BadRequest` if the call could never fit, or `StorageUnavailable`.
        """
        applicable = self._applicable.find(call)
        limits = applicable.limits
        if not limits:
            return UNLIMITED
        now = self._clock()
        may_extend = call.stream and len(applicable.stream_cutting) == len(applicable.budgets)
        estimate = estimate_call(call, now, may_extend=may_extend)
        charges = [limit.charge(estimate) for limit in limits]
        name = applicable.id_prefix + call.id
        verdict = await self._reserve(name, charges, now, from_slices=from_slices)
        if isinstance(verdict, Rejection):
            raise _rejection(limits, charges, verdict)
        return Reservation(
            self,
            name,
            limits,
            tightest_headers(applicable.header_groups, charges, verdict.remaining),
            charges=charges,
            holds_slot=applicable.holds_slot,
            is_leased=verdict.leased,
            stream_budget=(
                self._stream_budget(call, applicable.stream_cutting, name, estimate)
                if applicable.stream_cutting and call.stream
                else None
            ),
        )

    async def admit_cache_hit(self, call: Call, *, from_slices: bool = True) -> Reservation:
        """Reserve money for a call that the response cache answers. Other limits do not apply. Raises like `admit`."""
        prices, applicable = call.policy.cache_prices.get(call.model_name), self._applicable.find(call)
        if prices is None or not (budgets := applicable.budgets):
            return UNLIMITED
        now = self._clock()
        estimate = estimate_call(call, now, prices=highest_prices(prices.prices))
        charges = [budget.charge(estimate) for budget in budgets]
        name = f"{applicable.id_prefix}{call.id}+hit"  # not `admit`'s name, which is needed if the answer is gone
        verdict = await self._reserve(name, charges, now, from_slices=from_slices)
        if isinstance(verdict, Rejection):
            raise _rejection(budgets, charges, verdict)
        return Reservation(self, name, budgets, {}, charges=charges, is_leased=verdict.leased)

    async def charge_orphaned(self, call: Call, usage: Usage, cost_nanos: int, *, admitted: float) -> None:
        """Charge a recovered call, whose gateway died before it could settle the call's reservation.

        Settles the call's reservation if the storage still has it. Otherwise charges the cost to the budgets of the
        period that contains `admitted` (seconds since the epoch), even beyond their limits. Raises
        `StorageUnavailable`.
        """
        applicable, now = self._applicable.find(call), self._clock()
        name = applicable.id_prefix + call.id
        settled = await self.settle_orphaned(call, usage, cost_nanos)
        if settled is None:
            name += "+lost"  # the call id is still the name of the old reservation until its lease expires
        if applicable.budgets and not settled:
            charges = self.budget_charges(call, cost_nanos, admitted=admitted)
            await self._store.force_reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
            await self._store.settle(name, [cost_nanos] * len(charges), now=now)

    @property
    def slices(self) -> Slices | None:
        """The slices from which calls are admitted. None if the storage is not shared."""
        return self._slices

    def budget_charges(self, call: Call, cost_nanos: int, *, admitted: float) -> list[SpendCharge]:
        """Return the charges of a recovered call's cost to the budgets of the period that contains `admitted`."""
        return [budget.charge_for(cost_nanos, admitted) for budget in self._applicable.find(call).budgets]

    async def settle_orphaned(self, call: Call, usage: Usage, cost_nanos: int) -> bool | None:
        """Settle the reservation of a call whose gateway died.

        Returns False if the storage has no reservation of the call. Returns None if the reservation was made under
        other limits; it then ends when its lease expires. Raises `StorageUnavailable`.
        """
        applicable = self._applicable.find(call)
        actual = [limit.actual(usage, cost_nanos) for limit in applicable.limits]
        try:
            return bool(actual) and await self._store.settle(applicable.id_prefix + call.id, actual, now=self._clock())
        except ValueError:
            return None

    async def _reserve(
        self, name: str, charges: Sequence[Charge], now: float, *, from_slices: bool = True
    ) -> Grant | Rejection:
        """Take charges from slices, or reserve them in the storage.

        If they are granted by the storage, the background task extends the lease from then on.
        """
        slices = self._slices if from_slices else None
        verdict: Grant | Rejection | None = None
        try:
            if slices is not None:
                verdict = slices.take(name, charges) or await slices.lease(name, charges)
            if verdict is None:
                verdict = await self._store.reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
        except (StorageUnavailable, asyncio.CancelledError) as error:
            # The storage may have made the reservation although no answer arrived. Settle it to zero later.
            self._settle_later(name, [0] * len(charges))
            if isinstance(error, StorageUnavailable):
                self.storage_failures += 1
                if not self._is_rejecting:
                    log.error("rejecting calls that have limits, because the storage is unreachable: %s", error.message)
                self._is_rejecting = True
            raise
        if self._is_rejecting:
            self._is_rejecting = False
            log.warning("the storage is reachable again: calls that have limits are admitted")
        if isinstance(verdict, Grant) and not verdict.leased:
            self._open[name] = now
        return verdict

    def _stream_budget(
        self, call: Call, budgets: Sequence[BudgetLimit], name: str, estimate: CallEstimate
    ) -> StreamBudget:
        """Make the budget of a stream. Each further slice of money is a separate reservation until the stream ends."""

        async def reserve(number: int, nanos: int) -> Grant | Rejection:
            charges = [budget.charge_for(nanos, estimate.now) for budget in budgets]
            return await self._reserve(f"{name}+{number}", charges, self._clock())

        def give_back(number: int) -> None:
            self._open.pop(f"{name}+{number}", None)
            self._settle_later(f"{name}+{number}", [0] * len(budgets))

        prices = self._applicable.find(call).prices
        slice_nanos = highest_cost_nanos(prices, 0, call.principal.tenant.limits.default_output_tokens)
        return StreamBudget(estimate.cost_nanos, slice_nanos, reserve, give_back, budgets)

    def bill(self, name: str, actual: Sequence[int], receipt: str) -> None:
        """Account for the usage of a call that was admitted from slices, for `Reservation.bill`."""
        assert self._slices is not None
        self._slices.bill(name, actual, receipt)

    def forget(self, name: str) -> None:
        """Stop extending the lease of a reservation, for `Reservation.settle`, however settling it ends."""
        self._open.pop(name, None)

    async def release_slot(self, name: str) -> None:
        """Free a reservation's slot in the storage, for `Reservation.release_slot`."""
        try:
            await self._store.release_slots(name, now=self._clock())
        except StorageUnavailable:  # `settle` will also free the slot
            self.storage_failures += 1

    async def end(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        """Settle a reservation in the storage, for `Reservation.settle`."""
        self._open.pop(name, None)
        try:
            settled = await self._store.settle(name, actual, now=self._clock())
        except StorageUnavailable:
            self.storage_failures += 1
            self._settle_later(name, actual)
        except asyncio.CancelledError:
            self._settle_later(name, actual)  # settling is idempotent
            raise
        else:
            if not settled:
                await self._charge_forgotten(name, actual, charges)

    async def _charge_forgotten(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        """Charge the cost of a call whose reservation is no longer in the storage.

        The reservation is lost if this process was suspended for hours, or if the clock was set ahead.
        """
        both = zip(charges, actual, strict=True)
        spent = [(charge, amount) for charge, amount in both if isinstance(charge, SpendCharge) and amount]
        if not spent:
            return
        name, now = f"{name}+lost", self._clock()
        try:
            await self._store.force_reserve(name, [charge for charge, _ in spent], lease_seconds=LEASE_SECONDS, now=now)
            await self._store.settle(name, [amount for _, amount in spent], now=now)
        except StorageUnavailable:
            self.storage_failures += 1

    def _settle_later(self, name: str, actual: Sequence[int]) -> None:
        if len(self._unsettled) == MAX_UNSETTLED:
            self._unsettled.pop(next(iter(self._unsettled)))
            self.settlements_dropped += 1
        self._unsettled[name] = actual

    async def _run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
            await self.retry_unsettled()
            await self.extend_due()

    async def retry_unsettled(self) -> None:
        """Retry failed settlements until all have succeeded or the storage fails."""
        while self._unsettled:
            some = list(islice(self._unsettled.items(), MAX_CONCURRENT_OPERATIONS))
            now = self._clock()
            ended = await self._gather([partial(self._store.settle, name, actual, now=now) for name, actual in some])
            for (name, _), answer in zip(some, ended, strict=True):
                if answer is not None:
                    self._unsettled.pop(name, None)
            if None in ended:
                return

    async def extend_due(self) -> None:
        """Extend each lease after a third of its time. The other two thirds leave time for retries.

        Also extends every lease whose start time lies in the future, which means that the clock was set back.
        """
        now = self._clock()
        due = [name for name, since in self._open.items() if now >= since + EXTEND_SECONDS or now < since]
        for start in range(0, len(due), MAX_CONCURRENT_OPERATIONS):
            some = due[start : start + MAX_CONCURRENT_OPERATIONS]
            extend = partial(self._store.extend_lease, lease_seconds=LEASE_SECONDS, now=now)
            held = await self._gather([partial(extend, name) for name in some])
            for name, answer in zip(some, held, strict=True):
                if answer and name in self._open:
                    self._open[name] = now
                elif answer is False and self._open.pop(name, None) is not None:
                    self.leases_lost += 1
            if not any(answer is not None for answer in held):
                return

    async def _gather(self, operations: Sequence[Callable[[], Awaitable[bool]]]) -> list[bool | None]:
        """Run storage operations concurrently. Returns None for each operation that raised `StorageUnavailable`.

        Returns False for an operation that failed by a bug, so that it is not repeated and stops no other one.
        """
        answers = await asyncio.gather(*(self._answer(operation) for operation in operations))
        self.storage_failures += answers.count(None)
        return answers

    async def _answer(self, operation: Callable[[], Awaitable[bool]]) -> bool | None:
        try:
            return await operation()
        except StorageUnavailable:
            return None
        except Exception:
            self.settlements_dropped += 1
            log.exception("a reservation could not be settled or extended; it expires")
            return False


def _rejection(limits: Sequence[Limit[Any]], charges: Sequence[Charge], rejected: Rejection) -> GatewayError:
    return limits[rejected.index].rejection(charges[rejected.index], rejected)
