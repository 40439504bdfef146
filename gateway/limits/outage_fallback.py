"""Limits while the storage is away, where the policy says `local_share`: each gateway enforces its share by itself.

What is promised, for N gateways that all lose the storage at the same time:

* Nobody waits for it: one call finds out, within the storage's bound; those after it are answered from memory.
* Money: together they grant no more than was left when each last heard of an account, and so overspend at most by what
  was granted between those hearings. An account that a gateway never heard of has its whole limit, divided by N.
* Requests and tokens: the same, and refilled at the Nth part of the rate. A rate below N leaves each gateway one at a
  time.
* Places: a share of them, beside those that calls held before. A limit below N leaves nobody a place.
* Afterwards the storage is told of every call, those in flight included, before it decides again. Money counts to the
  last unit; a rate counts what was used within its last period. What a gateway that is killed meanwhile had granted is
  in its ledger alone.
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
from gateway.policy import StorageOutage
from gateway.storage.base import (
    HELD_RETRY_SECONDS,
    Charge,
    Grant,
    RateCharge,
    Rejection,
    ReservationStore,
    SlotCharge,
    tenant_of,
)

RETRY_SECONDS = 1.0
BEAT_SECONDS = 5.0  # how often a gateway says that it lives ...
ALIVE_SECONDS = 30.0  # ... and for how long that is believed
LEASE_SECONDS = 30.0  # of what the storage is told afterwards
MAX_UNREPORTED = 100_000  # calls of which it is still to be told; one more is refused
MAX_LAST_KNOWN = 50_000  # charges of which it is remembered what was left
MAX_AT_ONCE = 128

log = logging.getLogger("warmpath")


class _LastKnown(msgspec.Struct, frozen=True):
    """What was left of a charge when the storage last said so."""

    left: int
    at: float


class _UnreportedCall(msgspec.Struct):
    """A call that was granted here. Of one that has ended, the storage is told only what still matters."""

    charges: Sequence[Charge]
    at: float
    actual: Sequence[int] | None = None  # once it has ended
    adopted: tuple[int, ...] | None = None  # which charges the storage holds already
    whole: bool = False  # the storage may hold all of it, unheard


class OutageFallback:
    """The storage's counters or, while it is away, a share of them: a `ReservationStore` like any other.

    `make_local` makes an empty store in memory. Start and stop it with the application. The numbers are for telemetry.
    """

    def __init__(
        self,
        store: ReservationStore,
        make_local: Callable[[], ReservationStore],
        outage: Callable[[], StorageOutage],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._make_local = make_local
        self._outage = outage
        self._clock = clock
        self._local: ReservationStore | None = None  # while the storage is away
        self._last_known: dict[str, _LastKnown] = {}
        self._primed: set[str] = set()
        self._unreported: dict[str, _UnreportedCall] = {}
        self._numbers = count()
        self._replicas = 1
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.granted_locally = 0
        self.rejected_locally = 0

    @property
    def in_outage(self) -> bool:
        """Whether limits are enforced here, by shares."""
        return self._local is not None

    @property
    def unreported(self) -> int:
        return len(self._unreported)

    @property
    def replicas(self) -> int:
        """Among how many gateways limits are shared in an outage."""
        return self._outage().replicas or max(1, self._replicas)

    async def start(self) -> None:
        self._stopping.clear()
        await self.sync_with_storage()
        self._keeper = asyncio.create_task(self._keep(), name="limits in an outage")

    async def stop(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._stopping.set()
            await keeper
            await self.sync_with_storage()

    def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Coroutine[Any, Any, Grant | Rejection]:
        if self._local is None and self._outage().limits == "refuse":
            return self._store.reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
        return self._reserve(reservation_id, charges, lease_seconds, now)

    def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> Coroutine[Any, Any, bool]:
        if self._local is None and not self._unreported:
            return self._store.settle(reservation_id, actual, now=now)
        return self._settle(reservation_id, actual, now)

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        if self._local is not None:
            self._must_be_of_here(reservation_id)
            return await self._local.extend_lease(reservation_id, lease_seconds=lease_seconds, now=now)
        if reservation_id in self._unreported:
            return True  # the storage is about to be told
        return await self._store.extend_lease(reservation_id, lease_seconds=lease_seconds, now=now)

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        if self._local is not None:
            self._must_be_of_here(reservation_id)
            return await self._local.release_slots(reservation_id, now=now)
        return await self._store.release_slots(reservation_id, now=now)

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        await self._store.force_reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        """Of the whole, or of this gateway's share."""
        if self._local is None:
            return await self._store.remaining(charges, now=now)
        return await self._local.remaining([await self._share(charge, self._local) for charge in charges], now=now)

    async def expire_leases(self, owner: str, *, now: float) -> int:
        return await self._store.expire_leases(owner, now=now)

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        return await self._store.count_replicas(alive_seconds=alive_seconds, now=now)

    async def _reserve(
        self, reservation_id: str, charges: Sequence[Charge], lease_seconds: float, now: float
    ) -> Grant | Rejection:
        if self._local is None:
            try:
                verdict = await self._store.reserve(reservation_id, charges, lease_seconds=lease_seconds, now=now)
            except StorageUnavailable as error:
                if self._outage().limits == "refuse":
                    raise
                self._go_alone(error)
                # It may have been reserved without our hearing of it. Where it is refused here, that comes to nothing.
                everything = tuple(range(len(charges)))
                self._unreported[reservation_id] = _UnreportedCall(charges, now, [0] * len(charges), everything)
            else:
                if isinstance(verdict, Grant):
                    self._hear(charges, verdict.remaining, now)
                return verdict
        return await self._reserve_here(reservation_id, charges, lease_seconds, now)

    async def _reserve_here(
        self, reservation_id: str, charges: Sequence[Charge], lease_seconds: float, now: float
    ) -> Grant | Rejection:
        local = self._local
        assert local is not None
        if len(self._unreported) >= MAX_UNREPORTED:
            raise StorageUnavailable(f"the storage is away, and is to be told of {MAX_UNREPORTED} calls already")
        shares = [await self._share(charge, local) for charge in charges]
        verdict = await local.reserve(reservation_id, shares, lease_seconds=lease_seconds, now=now)
        if isinstance(verdict, Grant):
            self.granted_locally += 1
            unheard = reservation_id in self._unreported
            self._unreported[reservation_id] = _UnreportedCall(charges, now, whole=unheard)
            return verdict
        self.rejected_locally += 1
        charge = charges[verdict.index]
        if verdict.retry_after_seconds is None and charge.amount <= charge.limit:
            # Beyond this share, not beyond the limit: once the storage is back it may be granted.
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
            raise StorageUnavailable("the storage is away")
        return await self._store.settle(reservation_id, actual, now=now)

    def _must_be_of_here(self, reservation_id: str) -> None:
        if reservation_id not in self._unreported:
            raise StorageUnavailable("the storage is away")

    def _hear(self, charges: Sequence[Charge], remaining: Sequence[int], now: float) -> None:
        if len(self._last_known) > MAX_LAST_KNOWN:
            self._last_known.clear()
        for charge, left in zip(charges, remaining, strict=True):
            self._last_known[charge.key] = _LastKnown(left, now)

    def _go_alone(self, error: StorageUnavailable) -> None:
        if self._local is None:
            log.warning("limits are enforced by this gateway's share of them, one of %d: %s", self.replicas, error)
            self._local = self._make_local()
            self._primed.clear()

    async def _share(self, charge: Charge, local: ReservationStore) -> Charge:
        """This gateway's part of a charge; with what had been used of it, where that was heard."""
        replicas = self.replicas
        share = share_of(charge, replicas)
        if charge.key not in self._primed:
            self._primed.add(charge.key)
            heard = self._last_known.get(charge.key)
            if heard is not None and not isinstance(share, SlotCharge):
                used = -(-max(0, charge.limit - heard.left) // replicas)
                name = f"{tenant_of(charge.key)}/heard-{next(self._numbers)}"
                before = msgspec.structs.replace(share, amount=used)
                await local.force_reserve(name, [before], lease_seconds=LEASE_SECONDS, now=heard.at)
                await local.settle(name, [used], now=heard.at)
        return share

    async def _keep(self) -> None:
        beats = count(1)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
            if self._local is not None or self._unreported or next(beats) % round(BEAT_SECONDS / RETRY_SECONDS) == 0:
                await self.sync_with_storage()

    async def sync_with_storage(self) -> None:
        """Say that this gateway lives; and where the storage is back, tell it all, and let it decide again."""
        try:
            self._replicas = await self._store.count_replicas(alive_seconds=ALIVE_SECONDS, now=self._clock())
            if self._local is not None:
                await self._tell()  # most of it, before others may be granted what was used here
                self._local = None
                log.warning("the storage is back: limits are enforced by it again")
            while self._unreported:
                await self._tell()
        except StorageUnavailable:
            return  # the next time

    async def _tell(self) -> None:
        """Of every call until now. Raises `StorageUnavailable` where it is away again; nothing is told twice."""
        names = list(self._unreported)
        for start in range(0, len(names), MAX_AT_ONCE):
            told = (self._tell_of(name, self._unreported[name]) for name in names[start : start + MAX_AT_ONCE])
            errors = [error for error in await asyncio.gather(*told, return_exceptions=True) if error is not None]
            if errors:
                raise errors[0]

    async def _tell_of(self, name: str, unreported: _UnreportedCall) -> None:
        now = self._clock()
        if unreported.adopted is None:
            matters = tuple(i for i, charge in enumerate(unreported.charges) if _still_matters(charge, unreported, now))
            charges = [unreported.charges[i] for i in matters]
            await self._store.force_reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
            unreported.adopted = matters
        if unreported.actual is not None:
            await self._store.settle(name, [unreported.actual[i] for i in unreported.adopted], now=now)
        del self._unreported[name]  # one that goes on is the storage's from here on


def share_of(charge: Charge, replicas: int) -> Charge:
    """The part of a limit that one of so many gateways may grant by itself."""
    if isinstance(charge, RateCharge):
        limit = max(1, charge.limit // replicas)
        period_seconds = charge.period_seconds * limit * replicas / charge.limit  # so that the rate is exact
        return msgspec.structs.replace(charge, limit=limit, period_seconds=period_seconds)
    return msgspec.structs.replace(charge, limit=charge.limit // replicas)


def _still_matters(charge: Charge, unreported: _UnreportedCall, now: float) -> bool:
    """Of a call that has ended, places are free, and a rate has refilled after its period."""
    if unreported.actual is None or unreported.whole:
        return True
    if isinstance(charge, RateCharge):
        return now - unreported.at < charge.period_seconds
    return not isinstance(charge, SlotCharge)
