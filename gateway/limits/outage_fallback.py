"""Outage fallback: enforces limits while the storage is unreachable, if the policy sets `local_share`.

`OutageFallback` stands between the limiter and the storage. While the storage answers, `OutageFallback` forwards all
operations and records how much is left of each charge. The first operation that fails starts an outage. During the
outage, an initially empty store in memory decides. It enforces every limit divided by the number of gateways. Calls
that it grants are recorded as unreported. A background task tries the storage once per second. When the storage
answers, the task reports the unreported calls to it and ends the outage.

Guarantees for N gateways that lose the storage at the same time:

* One call waits until the storage operation times out. All later calls are decided in memory.
* Budgets: each gateway grants at most 1/N of the amount that was left at the storage's last answer to that gateway.
  Together the gateways overspend at most by what was granted after these answers. If a gateway has no such answer for
  a budget, it grants at most 1/N of the full limit.
* Rates: as for budgets, and they refill at 1/N of the rate. If a rate is below N, each gateway admits one request at a
  time.
* Slots: each gateway grants 1/N of them, in addition to the slots of calls admitted before the outage. If a limit is
  below N, no call gets a slot.
* After the outage, every granted call, including those in flight, is reported to the storage before the storage decides
  again. Budgets are then exact. A rate counts the usage of its last period. If a gateway dies during the outage, the
  calls that it granted are only in its ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import msgspec

from gateway.core.errors import StorageUnavailable
from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.policy import StorageOutage
from gateway.storage.base import (
    HELD_RETRY_SECONDS,
    Charge,
    Grant,
    RateCharge,
    Rejection,
    ReservationStore,
    SliceGrant,
    SliceReport,
    SlotCharge,
    tenant_of,
)

RETRY_SECONDS = 1.0  # between two attempts to reach the storage during an outage
HEARTBEAT_SECONDS = 5.0  # how often a gateway reports that it is alive
ALIVE_SECONDS = 30.0  # how long after its last report a gateway counts as alive
LEASE_SECONDS = 30.0  # lease of the reservations that are reported after an outage
MAX_UNREPORTED = 100_000  # calls; further calls are rejected
MAX_LAST_KNOWN = 50_000  # charges
MAX_CONCURRENT_REPORTS = 128

log = logging.getLogger("warmpath")


class _LastKnown(msgspec.Struct, frozen=True):
    """The amount that was left of a limit at the storage's last answer."""

    remaining: int
    at: float


class _UnreportedCall(msgspec.Struct):
    """A call that was granted locally. After the call has ended, only its charges that still count are reported."""

    charges: Sequence[Charge]
    at: float
    actual: Sequence[int] | None = None  # the call's actual usage, after it has ended
    sent: tuple[int, ...] | None = None  # indices of the charges that the storage may have: an answer may be lost
    reported: bool = False  # the storage has these charges


class OutageFallback:
    """A `ReservationStore` that uses the shared storage, or a local share of all limits while that is unreachable.

    `make_local` makes an empty store in memory. Start and stop the fallback with the application. All methods must be
    called on one event loop. The public counters count since the start; telemetry reads them.
    """

    def __init__(
        self,
        store: ReservationStore,
        make_local: Callable[[], ReservationStore],
        outage: Callable[[], StorageOutage],
        *,
        clock: Callable[[], float] = time.time,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._supervisor = supervisor or Supervisor()
        self._store = store
        self._make_local = make_local
        self._outage = outage
        self._clock = clock
        self._local: ReservationStore | None = None  # during an outage
        self._last_known: dict[str, _LastKnown] = {}  # by the charge's key
        self._primed: set[str] = set()  # keys of charges whose usage before the outage is already in `_local`
        self._unreported: dict[str, _UnreportedCall] = {}
        self._numbers = count()
        self._replicas = 1
        self._background: SupervisedTask | None = None
        self._stopping = asyncio.Event()
        self.granted_locally = 0
        self.rejected_locally = 0

    @property
    def in_outage(self) -> bool:
        """Whether the storage is unreachable, so that this gateway enforces its share of the limits alone."""
        return self._local is not None

    @property
    def unreported(self) -> int:
        """The number of calls that were granted locally and are not reported to the storage yet."""
        return len(self._unreported)

    @property
    def replicas(self) -> int:
        """The number of gateways by which limits are divided: the policy's number, or the storage's last count."""
        return self._outage().replicas or max(1, self._replicas)

    async def start(self) -> None:
        """Report this gateway as alive, and start the background task."""
        self._stopping.clear()
        await self.sync_with_storage()
        self._background = self._supervisor.start("limits in an outage", self._run, essential=True)

    async def stop(self) -> None:
        """Stop the background task, and try once to report the unreported calls."""
        background, self._background = self._background, None
        if background is not None:
            self._stopping.set()
            await background.join()
            await self.sync_with_storage()

    def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Coroutine[Any, Any, Grant | Rejection]:
        # Not an `async` function: it returns the store's coroutine, which saves every call a coroutine.
        if self._local is None and self._outage().limits == "refuse":
            return self._store.reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        return self._reserve(reservation_id, charges, lease_seconds, now)

    def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> Coroutine[Any, Any, bool]:
        if self._local is None and not self._unreported:
            return self._store.settle(reservation_id, actual, now=now)
        return self._settle(reservation_id, actual, now)

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        if self._local is not None:
            self._require_unreported(reservation_id)
            return await self._local.extend_lease(reservation_id, lease_seconds=lease_seconds, now=now)
        if reservation_id in self._unreported:
            return True  # the call will be reported to the storage soon, with a new lease
        return await self._store.extend_lease(reservation_id, lease_seconds=lease_seconds, now=now)

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        if self._local is not None:
            self._require_unreported(reservation_id)
            return await self._local.release_slots(reservation_id, now=now)
        return await self._store.release_slots(reservation_id, now=now)

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        await self._store.force_reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        """Return what is left of each limit. During an outage, return what is left of this gateway's shares."""
        if self._local is None:
            return await self._store.remaining(charges, now=now)
        return await self._local.remaining([await self._share(charge, self._local) for charge in charges], now=now)

    async def expire_leases(self, owner: str, *, now: float) -> int:
        return await self._store.expire_leases(owner, now=now)

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        return await self._store.count_replicas(alive_seconds=alive_seconds, now=now)

    async def report_slices(
        self, tenant: str, owner: str, report: SliceReport, *, lease_seconds: float, now: float
    ) -> SliceGrant:
        """Pass a report on. Raises `StorageUnavailable` during an outage; the report is repeated after it."""
        if self._local is not None:
            raise StorageUnavailable("the storage is unreachable")
        try:
            grant = await self._store.report_slices(tenant, owner, report, lease_seconds=lease_seconds, now=now)
        except StorageUnavailable as error:
            if self._outage().limits != "refuse":
                self._start_outage(error)
            raise
        self._note_remaining([use.charge for use in report.uses], grant.remaining, now)
        return grant

    async def settled_receipt(self, tenant: str, owner: str) -> str | None:
        return await self._store.settled_receipt(tenant, owner)

    async def _reserve(
        self, reservation_id: str, charges: Sequence[Charge], lease_seconds: float, now: float
    ) -> Grant | Rejection:
        if self._local is None:
            try:
                verdict = await self._store.reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
            except StorageUnavailable as error:
                if self._outage().limits == "refuse":
                    raise
                self._start_outage(error)
                # The storage may have made the reservation although no answer arrived. If the call is rejected
                # locally, it is reported as a call that used nothing.
                unused = [0] * len(charges)
                self._unreported[reservation_id] = _UnreportedCall(
                    charges, now, unused, _all_of(charges), reported=True
                )
            else:
                if isinstance(verdict, Grant):
                    self._note_remaining(charges, verdict.remaining, now)
                return verdict
        return await self._reserve_locally(reservation_id, charges, lease_seconds, now)

    async def _reserve_locally(
        self, reservation_id: str, charges: Sequence[Charge], lease_seconds: float, now: float
    ) -> Grant | Rejection:
        local = self._local
        assert local is not None
        if len(self._unreported) >= MAX_UNREPORTED:
            raise StorageUnavailable(f"the storage is unreachable, and {MAX_UNREPORTED} calls are unreported already")
        shares = [await self._share(charge, local) for charge in charges]
        verdict = await local.reserve(reservation_id, shares, lease_seconds=lease_seconds, now=now)
        if isinstance(verdict, Grant):
            self.granted_locally += 1
            sent = _all_of(charges) if reservation_id in self._unreported else None
            self._unreported[reservation_id] = _UnreportedCall(charges, now, sent=sent)
            return verdict
        self.rejected_locally += 1
        charge = charges[verdict.index]
        if verdict.retry_after_seconds is None and charge.amount <= charge.limit:
            # The charge exceeds this share but not the limit, so the storage may grant it after the outage.
            return msgspec.structs.replace(verdict, retry_after_seconds=HELD_RETRY_SECONDS)
        return verdict

    async def _settle(self, reservation_id: str, actual: Sequence[int], now: float) -> bool:
        unreported = self._unreported.get(reservation_id)
        if unreported is not None:
            unreported.actual = actual
            if self._local is not None:
                await self._local.settle(reservation_id, actual, now=now)
            return True
        if self._local is not None:
            raise StorageUnavailable("the storage is unreachable")
        return await self._store.settle(reservation_id, actual, now=now)

    def _require_unreported(self, reservation_id: str) -> None:
        if reservation_id not in self._unreported:
            raise StorageUnavailable("the storage is unreachable")

    def _note_remaining(self, charges: Sequence[Charge], remaining: Sequence[int], now: float) -> None:
        if len(self._last_known) > MAX_LAST_KNOWN:
            self._last_known.clear()
        for charge, amount in zip(charges, remaining, strict=True):
            self._last_known[charge.key] = _LastKnown(amount, now)

    def _start_outage(self, error: StorageUnavailable) -> None:
        if self._local is None:
            log.warning(
                "the storage is unreachable, so this gateway enforces 1/%d of each limit alone: %s",
                self.replicas,
                error,
            )
            self._local = self._make_local()
            self._primed.clear()

    async def _share(self, charge: Charge, local: ReservationStore) -> Charge:
        """Return this gateway's share of a charge. On first use, also adds its share of earlier usage to `local`."""
        replicas = self.replicas
        share = share_of(charge, replicas)
        if charge.key not in self._primed:
            self._primed.add(charge.key)
            known = self._last_known.get(charge.key)
            if known is not None and not isinstance(share, SlotCharge):
                # Rounded up, so that the shares of all gateways never exceed what was left.
                used = -(-max(0, charge.limit - known.remaining) // replicas)
                name = f"{tenant_of(charge.key)}/heard-{next(self._numbers)}"
                before = msgspec.structs.replace(share, amount=used)
                await local.force_reserve(name, [before], lease_seconds=LEASE_SECONDS, now=known.at)
                await local.settle(name, [used], now=known.at)
        return share

    async def _run(self) -> None:
        beats = count(1)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
            if (
                self._local is not None
                or self._unreported
                or next(beats) % round(HEARTBEAT_SECONDS / RETRY_SECONDS) == 0
            ):
                await self.sync_with_storage()

    async def sync_with_storage(self) -> None:
        """Report this gateway as alive. After an outage, also report the calls that were granted locally."""
        try:
            self._replicas = await self._store.count_replicas(alive_seconds=ALIVE_SECONDS, now=self._clock())
            if self._local is not None:
                await self._report_all()  # before the storage decides again, so that it grants nothing twice
                self._local = None
                log.warning("the storage is reachable again, and enforces the limits")
            while self._unreported:
                await self._report_all()
        except StorageUnavailable:
            return  # the background task tries again

    async def _report_all(self) -> None:
        """Report all unreported calls. If this raises `StorageUnavailable`, the next run reports only the rest.

        A call that cannot be reported for another reason is logged and dropped, so that it holds up no other call.
        """
        names = list(self._unreported)
        for start in range(0, len(names), MAX_CONCURRENT_REPORTS):
            some = names[start : start + MAX_CONCURRENT_REPORTS]
            reports = (self._report(name, self._unreported[name]) for name in some)
            ends = await asyncio.gather(*reports, return_exceptions=True)
            for name, error in zip(some, ends, strict=True):
                if isinstance(error, Exception) and not isinstance(error, StorageUnavailable):
                    log.error("limits may lack the usage of %s, which cannot be reported", name, exc_info=error)
                    self._unreported.pop(name, None)
            for error in ends:
                if isinstance(error, StorageUnavailable):
                    raise error

    async def _report(self, name: str, unreported: _UnreportedCall) -> None:
        now = self._clock()
        if unreported.sent is None:  # decided once, since the storage keeps what it gets although its answer is lost
            charges = enumerate(unreported.charges)
            unreported.sent = tuple(i for i, charge in charges if _still_counts(charge, unreported, now))
        sent = unreported.sent
        if not unreported.reported:
            counting = [unreported.charges[i] for i in sent]
            await self._store.force_reserve(name, counting, lease_seconds=LEASE_SECONDS, now=now)
            unreported.reported = True
        if unreported.actual is not None:
            await self._store.settle(name, [unreported.actual[i] for i in sent], now=now)
        del self._unreported[name]  # if the call still runs, the storage has its reservation from now on


def _all_of(charges: Sequence[Charge]) -> tuple[int, ...]:
    return tuple(range(len(charges)))


def share_of(charge: Charge, replicas: int) -> Charge:
    """Return the share of a limit that one of `replicas` gateways may grant alone."""
    if isinstance(charge, RateCharge):
        limit = max(1, charge.limit // replicas)
        period_seconds = charge.period_seconds * limit * replicas / charge.limit  # so that the rate is exact
        return msgspec.structs.replace(charge, limit=limit, period_seconds=period_seconds)
    return msgspec.structs.replace(charge, limit=charge.limit // replicas)


def _still_counts(charge: Charge, unreported: _UnreportedCall, now: float) -> bool:
    """Return whether a charge must still be reported.

    That is not so if the call has ended and the charge is for a slot, or for a rate that has refilled since.
    """
    if unreported.actual is None:
        return True
    if isinstance(charge, RateCharge):
        return now - unreported.at < charge.period_seconds
    return not isinstance(charge, SlotCharge)
