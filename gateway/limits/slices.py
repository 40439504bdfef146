"""Leased slices of limits: admits calls without a storage operation per call.

`Slices` stands between the limiter and the shared storage. It leases slices of a tenant's limits with one storage
operation for all of them, and admits calls from them synchronously (`tenant_slices.py`). A background task reports
once a second what was used, renews the slices, and returns those that are not used.

    take      enough is unused: the call is admitted at once
    lease     not enough: one report for all calls that wait asks for what they need, and for more
    reserve   a slice would be too small, or the report did not bring enough: the storage decides about this call alone

* What all slices hold and what is used never exceed a limit together. A call is rejected only by the storage, after
  this gateway has returned the unused part of its own slices.
* A slice is as large as the demand of two seconds, and at most the gateway's share of half of what is left. If that is
  less than a few calls need, calls are reserved one by one.
* A slice that is not used for a second is returned. If the gateway is killed, its slices end after `LEASE_SECONDS`. The
  unused part of a rate then counts as used, because the gateway may have used it.
* The cost of a call is reported after its receipt is durable, in the order of the ledger. The storage stores with it
  which receipt was the last. After `kill -9`, crash recovery charges the receipts after that one
  (`gateway.billing.recovery`), so budgets equal the ledger. Slices are leased only after recovery.
* While the storage is unreachable, slices admit calls until their lease ends. Then `OutageFallback` decides. Reports
  are sent again until the storage has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from gateway.core.errors import LedgerUnavailable, StorageUnavailable
from gateway.core.ids import new_event_id
from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.limits.tenant_slices import LEASE_SECONDS, TenantSlices
from gateway.storage.base import (
    Charge,
    Grant,
    Rejection,
    ReservationStore,
    SliceGrant,
    SliceReport,
    SliceUse,
    SpendCharge,
    tenant_of,
)

REPORT_SECONDS = 1.0
MAX_UNREPORTED = 10_000  # calls whose cost is not reported; more are reserved one by one. Crash recovery reads as many
MAX_CONCURRENT_REPORTS = 128  # tenants at once; their reports form a few pipelines or transactions

log = logging.getLogger(__name__)


async def _durable_at_once() -> None:
    """Stand for a ledger whose rows are always durable."""


class Slices:
    """A `ReservationStore` that admits calls from leased slices. Start and stop it with the application.

    `owner` is the gateway's name in the storage, and that of its chain in the ledger. `durable` waits until all
    receipts that are written are durable. `in_outage` is whether the store decides without the shared storage. All
    methods must be called on one event loop. The public counters count since the start.
    """

    def __init__(
        self,
        store: ReservationStore,
        owner: str,
        *,
        replicas: Callable[[], int] = lambda: 1,
        durable: Callable[[], Awaitable[None]] = _durable_at_once,
        in_outage: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.owner = owner
        self.admitted = 0  # calls that were admitted from slices
        self.reports = 0  # storage operations for slices
        self.used_roots: set[str] = set()  # whose limits were used since `BudgetWarnings` took the set
        self._store = store
        self._replicas = replicas
        self._durable = durable
        self._in_outage = in_outage
        self._clock = clock
        self._monotonic = monotonic
        self._supervisor = supervisor or Supervisor()
        self._process = new_event_id()  # older than all receipts of this process
        self._numbers = itertools.count(1)
        self._reported: set[str] = set()  # tenants of which slices were made
        self._tenants: dict[str, TenantSlices] = {}
        self._waiting: dict[str, list[_Waiter]] = {}  # by tenant
        self._renewals: dict[str, asyncio.Task[None]] = {}  # by tenant
        self._leasing = False  # until crash recovery is done
        self._background: SupervisedTask | None = None
        self._stopping = asyncio.Event()

    @property
    def call_count(self) -> int:
        """The number of calls in flight that have parts of slices."""
        return sum([len(each.calls) for each in self._tenants.values()])

    @property
    def unreported(self) -> int:
        """The number of calls whose cost is not reported yet."""
        return sum([each.cost_count for each in self._tenants.values()])

    async def start(self) -> None:
        """Start the background task. Slices are leased after `begin_leasing`."""
        self._stopping.clear()
        self._background = self._supervisor.start("slices of limits", self._run, essential=True)

    def begin_leasing(self) -> None:
        """Lease slices from now on. Called after the receipts of the previous process have been charged."""
        self._leasing = True

    async def stop(self) -> None:
        """Stop the background task, report all usage, and return all slices, if the storage answers."""
        background, self._background = self._background, None
        self._leasing = False
        if background is not None:
            self._stopping.set()
            await background.join()
            await self.report_all(give_back=True)

    # Admission

    def take(self, reservation_id: str, charges: Sequence[Charge]) -> Grant | None:
        """Admit a call from the slices, synchronously. Returns None if they do not suffice; see `lease`."""
        tenant = tenant_of(reservation_id)
        slices = self._tenants.get(tenant)
        if slices is None or not self._leasing:
            return None
        grant = slices.take(reservation_id, charges, self._monotonic())
        if grant is not None:
            self.admitted += 1
            if slices.wants_renewal:
                self._renew(slices)
        return grant

    async def lease(self, reservation_id: str, charges: Sequence[Charge]) -> Grant | None:
        """Enlarge the slices and admit a call from them. Returns None if the call must be reserved one by one.

        Raises `StorageUnavailable`.
        """
        slices = self._slices_of(tenant_of(reservation_id))
        if not self._leasing or self._in_outage() or self.unreported >= MAX_UNREPORTED:
            return None
        if not slices.can_lease(charges, self._monotonic()):
            return None
        waiter = _Waiter(reservation_id, charges, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(slices.tenant, []).append(waiter)
        self._renew(slices)
        try:
            return await waiter.answer
        except asyncio.CancelledError:
            if waiter.was_granted:  # in the tick of the cancellation
                await self.settle(reservation_id, [0] * len(charges), now=self._clock())
            raise
        except StorageUnavailable:
            if self._in_outage():
                return None
            raise

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        """Reserve the charges of one call in the storage.

        Before a rejection, this gateway reports its slices: their unused parts become free, and the time to wait is
        that of what was used.
        """
        verdict = await self._store.reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        if isinstance(verdict, Grant):
            return verdict
        slices = self._tenants.get(tenant_of(reservation_id))
        if slices is None or not slices.holds_unreported(charges):
            return verdict
        slices.withhold(charges, self._monotonic())
        with contextlib.suppress(StorageUnavailable):
            await self._report(slices)
        return await self._store.reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)

    # The end of calls

    def bill(self, reservation_id: str, actual: Sequence[int], receipt: str) -> bool:
        """Account for the actual usage of a call whose receipt was just written to the ledger.

        Returns False if the call was not admitted from slices. The call keeps its slot until `settle`.
        """
        slices = self._tenants.get(tenant_of(reservation_id))
        return slices is not None and slices.bill(reservation_id, actual, receipt)

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        slices = self._tenants.get(tenant_of(reservation_id))
        if slices is None or reservation_id not in slices.calls:
            return await self._store.settle(reservation_id, actual, now=now)
        slices.bill(reservation_id, actual, None)  # nothing is left to be billed if the receipt was
        slices.release_slots(reservation_id)
        return True

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        slices = self._tenants.get(tenant_of(reservation_id))
        if slices is None or reservation_id not in slices.calls:
            return await self._store.release_slots(reservation_id, now=now)
        return slices.release_slots(reservation_id)

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        slices = self._tenants.get(tenant_of(reservation_id))
        if slices is not None and reservation_id in slices.calls:
            return True  # the reports renew the lease
        return await self._store.extend_lease(reservation_id, lease_seconds=lease_seconds, now=now)

    # Crash recovery

    def charge_cost(self, tenant: str, charges: Sequence[SpendCharge], receipt: str) -> None:
        """Charge the cost of a recovered call whose receipt was just written to this gateway's chain."""
        self._slices_of(tenant).charge_cost(charges, receipt, self._monotonic())

    async def unsettled_receipts(self, tenant: str, owner: str, receipts: Sequence[str]) -> Sequence[str]:
        """Return those of an owner's receipts that it did not report, in the order of its chain in the ledger.

        `receipts` has the event ids of the tenant's last receipts with slices. Repeats the operation until the storage
        has answered.
        """
        while True:
            try:
                last = await self._store.settled_receipt(tenant, owner)
                break
            except StorageUnavailable as error:
                log.warning("budgets lack the cost of calls before the crash, retrying: %s", error.message)
                await asyncio.sleep(REPORT_SECONDS)
        if not last:  # the storage has lost its data, and with them what was spent
            return ()
        if last in receipts:
            return receipts[receipts.index(last) + 1 :]
        return [each for each in receipts if each > last]

    async def charge_receipts(self, tenant: str, owner: str, charges: Sequence[SpendCharge], receipt: str) -> None:
        """Charge the receipts that a dead gateway did not report. `receipt` is the last of them. Call it once.

        Repeats the report until the storage has answered.
        """
        uses = tuple([SliceUse(charge, used=charge.amount) for charge in charges])
        report = SliceReport(new_event_id(), 1, uses, receipt, 1)
        while True:
            try:
                await self.report_slices(tenant, owner, report, lease_seconds=LEASE_SECONDS, now=self._clock())
                return
            except StorageUnavailable as error:
                log.warning("budgets lack the cost of calls before the crash, retrying: %s", error.message)
                await asyncio.sleep(REPORT_SECONDS)

    # Reports

    def _slices_of(self, tenant: str) -> TenantSlices:
        self.used_roots.add(tenant)
        slices = self._tenants.get(tenant)
        if slices is None:
            began = None if tenant in self._reported else self._process
            self._reported.add(tenant)
            slices = self._tenants[tenant] = TenantSlices(tenant, self._process, self._numbers, began)
        return slices

    def _renew(self, slices: TenantSlices) -> asyncio.Task[None]:
        """Send a report in the background. Joins the task that already does so, which then sends another one."""
        renewal = self._renewals.get(slices.tenant)
        if renewal is None:
            renewal = asyncio.get_running_loop().create_task(self._send_reports(slices), name="slices")
            self._renewals[slices.tenant] = renewal
        return renewal

    async def _report(self, slices: TenantSlices) -> None:
        """Send a report that is made from now on. Raises `StorageUnavailable`."""
        if (renewal := self._renewals.get(slices.tenant)) is not None:
            await asyncio.shield(renewal)
        await asyncio.shield(self._renew(slices))
        if slices.unanswered is not None:
            raise StorageUnavailable("the storage did not answer")

    async def _send_reports(self, slices: TenantSlices) -> None:
        """Send the report that is due, and another one while calls wait."""
        waiting: list[_Waiter] = []
        try:
            while True:
                report = slices.unanswered
                if report is None:
                    waiting = [each for each in self._waiting.pop(slices.tenant, []) if not each.answer.done()]
                    report = slices.make_report([each.charges for each in waiting], self._replicas(), self._monotonic())
                self.reports += 1
                self.used_roots.add(slices.tenant)
                grant = await self._store.report_slices(
                    slices.tenant, self.owner, report, lease_seconds=LEASE_SECONDS, now=self._clock()
                )
                slices.apply(report, grant, self._monotonic())
                self._answer(slices, waiting)
                waiting = []
                if not self._waiting.get(slices.tenant) and not slices.holds_small:
                    return
        except StorageUnavailable as error:
            for each in [*waiting, *self._waiting.pop(slices.tenant, [])]:
                each.fail(error)
        except Exception:
            log.exception("a report about slices of limits failed; their calls are reserved one by one")
            slices.unanswered = None
            for each in [*waiting, *self._waiting.pop(slices.tenant, [])]:
                each.grant(None)
        finally:
            del self._renewals[slices.tenant]  # here, so that no later call joins a task that has ended

    def _answer(self, slices: TenantSlices, waiting: Sequence[_Waiter]) -> None:
        now = self._monotonic()
        for each in waiting:
            if each.answer.done():  # its caller was cancelled
                continue
            grant = slices.take(each.reservation_id, each.charges, now)
            if grant is None:
                slices.mark_small(each.charges, now)
            else:
                self.admitted += 1
            each.grant(grant)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    await self._stopping.wait()
            await self.report_all()

    async def report_all(self, *, give_back: bool = False) -> None:
        """Report and renew the slices of all tenants for which it is due. `give_back` returns all slices."""
        counts = {name: each.cost_count for name, each in self._tenants.items() if each.cost_count}
        if counts:
            with contextlib.suppress(
                LedgerUnavailable
            ):  # already logged; nothing is charged before the receipt is durable
                await self._durable()
                for name, count in counts.items():
                    self._tenants[name].receipts_are_durable(count)
        now = self._monotonic()
        for name, each in list(self._tenants.items()):
            if each.is_empty and name not in self._renewals and not self._waiting.get(name):
                del self._tenants[name]
            elif give_back:
                each.give_back()
        due = [each for each in self._tenants.values() if give_back or each.is_due(now)]
        for start in range(0, len(due), MAX_CONCURRENT_REPORTS):
            renewals = [self._renew(each) for each in due[start : start + MAX_CONCURRENT_REPORTS]]
            await asyncio.wait(renewals)

    # Passed on to the storage

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        await self._store.force_reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        return await self._store.remaining(charges, now=now)

    async def expire_leases(self, owner: str, *, now: float) -> int:
        return await self._store.expire_leases(owner, now=now)

    async def report_slices(
        self, tenant: str, owner: str, report: SliceReport, *, lease_seconds: float, now: float
    ) -> SliceGrant:
        return await self._store.report_slices(tenant, owner, report, lease_seconds=lease_seconds, now=now)

    async def settled_receipt(self, tenant: str, owner: str) -> str | None:
        return await self._store.settled_receipt(tenant, owner)

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        return await self._store.count_replicas(alive_seconds=alive_seconds, now=now)


class _Waiter:
    """A call that waits for a report."""

    __slots__ = ("answer", "charges", "reservation_id", "was_granted")

    def __init__(self, reservation_id: str, charges: Sequence[Charge], answer: asyncio.Future[Grant | None]) -> None:
        self.reservation_id = reservation_id
        self.charges = charges
        self.answer = answer
        self.was_granted = False

    def grant(self, grant: Grant | None) -> None:
        self.was_granted = grant is not None
        if not self.answer.done():
            self.answer.set_result(grant)

    def fail(self, error: StorageUnavailable) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
