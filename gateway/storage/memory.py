"""The storage engine for a single process: keeps everything in dictionaries. Tests also use it.

Each reservation, bucket, account and gateway's slices has one entry in a heap of due times (`_sweeps`). Every operation
first handles the entries that are due: it ends leases, and deletes entries that are no longer needed. No method awaits,
so each method is atomic on its event loop.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from gateway.storage.base import (
    DEFAULT_BLOB_BYTES,
    DEFAULT_DOCUMENT_BYTES,
    HELD_RETRY_SECONDS,
    REMEMBER_SECONDS,
    Charge,
    Document,
    Grant,
    KeyRecord,
    RateCharge,
    RecordChanges,
    Rejection,
    SliceGrant,
    SliceReport,
    SpendCharge,
    StoredRecord,
)
from gateway.storage.checks import check_actual, check_charges, check_report
from gateway.storage.evaluation import evaluate_account, evaluate_rate, room_before
from gateway.storage.leaky_bucket import LeakyBucket
from gateway.storage.memory_documents import MemoryDocuments
from gateway.storage.memory_records import MemoryRecords
from gateway.storage.memory_slices import MemorySlices

LOOK_AGAIN_SECONDS = 1.0  # pause between checks of a bucket; without it, busy buckets are checked at each operation
SPARE_SWEEPS = 256  # stale heap entries allowed, in addition to one per live entry


class _Account:
    """The spent and held amounts of one budget, or the held slots of one concurrency limit."""

    __slots__ = ("forget_at", "held", "spent")

    def __init__(self) -> None:
        self.spent = 0
        self.held = 0
        self.forget_at = 0.0


_UNUSED = _Account()  # stands for accounts that do not exist yet
_NEW = LeakyBucket()  # stands for buckets that do not exist yet


class _Reservation(msgspec.Struct):
    owner: str
    charges: tuple[Charge, ...]
    poured_at: list[float]  # for each charge: time at which a rate was poured in, else 0
    slots: list[_Account]  # accounts of which the reservation holds one unit each
    budgets: list[tuple[_Account, int]]  # accounts, and the amount of each that the reservation holds
    expires_at: float  # the end of the lease
    forget_at: float
    holding: bool = True  # until the lease ends


class MemoryStorage:
    """Storage engine for `memory://` URLs.

    `clock` is used only for the expiry of blobs and documents. All other operations use the caller's `now`.
    """

    is_shared: ClassVar[bool] = False

    def __init__(
        self,
        url: str = "memory://",
        *,
        owner: str = "",
        blob_bytes: int = DEFAULT_BLOB_BYTES,
        document_bytes: int = DEFAULT_DOCUMENT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._owner = owner
        self._buckets: dict[str, LeakyBucket] = {}
        self._accounts: dict[str, _Account] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._keys: dict[str, KeyRecord] = {}
        # A heap of (due time, kind, key), with one entry for each entry of the three maps above. Reservations that were
        # settled before their lease ended leave stale entries. Most entries are stale, because leases are long.
        self._sweeps: list[tuple[float, str, str]] = []
        self._sweeps_max = SPARE_SWEEPS
        self._sweepers = {
            "reservation": self._sweep_reservation,
            "bucket": self._sweep_bucket,
            "account": self._sweep_account,
            "slices": self._sweep_slices,
        }
        self._slices = MemorySlices(self._bucket, self._account)
        self._blobs: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # least recently used first
        self._blob_bytes_free = self._blob_bytes = blob_bytes
        self._documents = MemoryDocuments(document_bytes, clock)
        self._records = MemoryRecords()
        self._clock = clock

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        """End the leases that are due, then take all charges or none."""
        check_charges(reservation_id, charges)
        if self._sweeps and self._sweeps[0][0] <= now:
            self._sweep(now)
        if reservation_id in self._reservations:
            raise ValueError(f"reservation {reservation_id} is already open")
        remaining = self._take(reservation_id, charges, lease_seconds, now)
        return remaining if type(remaining) is Rejection else Grant(remaining)

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        check_charges(reservation_id, charges)
        self._sweep(now)
        if reservation_id not in self._reservations:
            self._take(reservation_id, charges, lease_seconds, now, force=True)

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        self._sweep(now)
        return tuple([room_before(charge, self._evaluate(0, charge, now, slices_are_left=True)) for charge in charges])

    def _evaluate(self, index: int, charge: Charge, now: float, *, slices_are_left: bool = False) -> int | Rejection:
        unused = self._slices.unused(charge.key)
        if type(charge) is RateCharge:
            held = 0 if slices_are_left else unused
            return evaluate_rate(index, charge, self._buckets.get(charge.key, _NEW), now, held)
        account = self._accounts.get(charge.key, _UNUSED)
        return evaluate_account(index, charge, account.spent, account.held - (unused if slices_are_left else 0))

    def _take(
        self, reservation_id: str, charges: Sequence[Charge], lease_seconds: float, now: float, *, force: bool = False
    ) -> tuple[int, ...] | Rejection:
        """Take the charges, and return the amount left of each limit. Takes all charges or none, unless `force`.

        Each charge is taken before the code knows whether all charges fit. If one does not fit, all are undone. A
        granted reservation therefore looks up each account once, and only a rejection costs more.
        """
        expires_at = now + lease_seconds
        poured_at: list[float] = []
        held_slots: list[_Account] = []
        budgets: list[tuple[_Account, int]] = []
        reservation = _Reservation(
            self._owner, tuple(charges), poured_at, held_slots, budgets, expires_at, expires_at + REMEMBER_SECONDS
        )
        remaining: list[int] = []
        has_slices = self._slices.has_holds()
        for charge in charges:
            key = charge.key
            if type(charge) is RateCharge:
                bucket = self._bucket(key, now)
                room = bucket.pour(charge.amount, charge, now)
                if has_slices:
                    room -= self._slices.unused(key)
                left, fits = int(room), room >= 0
                poured_at.append(bucket.time)
            elif type(charge) is SpendCharge:
                account = self._account(key, now + charge.keep_seconds)
                account.held += charge.amount
                left = charge.limit - account.spent - account.held
                fits = left >= 0
                budgets.append((account, charge.amount))
                poured_at.append(0.0)
            else:
                slots = self._account(key, expires_at)
                slots.held += 1
                left = charge.limit - slots.held
                fits = left >= 0
                held_slots.append(slots)
                poured_at.append(0.0)
            if not fits and not force:
                self._give_back(reservation)
                rejection = self._evaluate(len(remaining), charge, now)
                assert type(rejection) is Rejection
                return rejection
            remaining.append(left)
        self._reservations[reservation_id] = reservation
        if len(self._sweeps) > self._sweeps_max:
            self._drop_stale_sweeps()
        heapq.heappush(self._sweeps, (expires_at, "reservation", reservation_id))
        return tuple(remaining)

    def _give_back(self, reservation: _Reservation) -> None:
        """Undo the charges that were taken for a rejected reservation."""
        self._return_holds(reservation)
        for charge, _ in zip(reservation.charges, reservation.poured_at, strict=False):
            if type(charge) is RateCharge:
                self._buckets[charge.key].unpour(charge)

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        self._sweep(now)
        reservation = self._reservations.get(reservation_id)
        if reservation is None or not reservation.holding:
            return False
        reservation.expires_at = now + lease_seconds
        reservation.forget_at = reservation.expires_at + REMEMBER_SECONDS
        return True

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        if self._sweeps and self._sweeps[0][0] <= now:
            self._sweep(now)
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return False
        slots = reservation.slots
        freed = len(slots) > 0
        while slots:
            slots.pop().held -= 1
        return freed

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        if self._sweeps and self._sweeps[0][0] <= now:
            self._sweep(now)
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return False
        check_actual(reservation_id, actual, charges=len(reservation.charges))
        del self._reservations[reservation_id]
        self._return_holds(reservation)
        for charge, poured_at, used in zip(reservation.charges, reservation.poured_at, actual, strict=True):
            if type(charge) is RateCharge:
                if used != charge.amount:
                    self._bucket(charge.key, now).settle(used, charge, poured_at, now)
            elif type(charge) is SpendCharge:
                self._account(charge.key, now + charge.keep_seconds).spent += used
        return True

    async def expire_leases(self, owner: str, *, now: float) -> int:
        self._sweep(now)
        leased = [r for r in self._reservations.values() if r.owner == owner and r.holding]
        for reservation in leased:
            self._return_holds(reservation)
        return len(leased) + self._slices.expire(owner, now)

    async def report_slices(
        self, tenant: str, owner: str, report: SliceReport, *, lease_seconds: float, now: float
    ) -> SliceGrant:
        check_report(tenant, report)
        self._sweep(now)
        is_new = self._slices.load((tenant, owner)) is None
        grant = self._slices.report(tenant, owner, report, lease_seconds, now)
        if is_new:
            heapq.heappush(self._sweeps, (now + lease_seconds, "slices", f"{tenant}/{owner}"))
        return grant

    async def settled_receipt(self, tenant: str, owner: str) -> str | None:
        return self._slices.settled_receipt(tenant, owner)

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        """Return 1 if this engine has an owner, else 0, because no other process can share this store."""
        return 1 if self._owner else 0

    def _return_holds(self, reservation: _Reservation) -> None:
        """Free the slots and the held budgets of a reservation. A second call does nothing."""
        if reservation.holding:
            reservation.holding = False
            while reservation.slots:
                reservation.slots.pop().held -= 1
            for account, amount in reservation.budgets:
                account.held -= amount

    def _bucket(self, key: str, now: float) -> LeakyBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = LeakyBucket()
            heapq.heappush(self._sweeps, (now + LOOK_AGAIN_SECONDS, "bucket", key))
        return bucket

    def _account(self, key: str, forget_at: float) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account()
            heapq.heappush(self._sweeps, (forget_at, "account", key))
        if forget_at > account.forget_at:
            account.forget_at = forget_at
        return account

    def _sweep(self, now: float) -> None:
        """Handle all heap entries that are due.

        Each `_sweep_...` method returns the next due time of its entry, or None if the entry was deleted.
        """
        while self._sweeps and self._sweeps[0][0] <= now:
            _, kind, key = heapq.heappop(self._sweeps)
            due_again_at = self._sweepers[kind](key, now)
            if due_again_at is not None:
                heapq.heappush(self._sweeps, (due_again_at, kind, key))

    def _drop_stale_sweeps(self) -> None:
        self._sweeps = [sweep for sweep in self._sweeps if sweep[1] != "reservation" or sweep[2] in self._reservations]
        heapq.heapify(self._sweeps)
        self._sweeps_max = 2 * len(self._sweeps) + SPARE_SWEEPS

    def _sweep_reservation(self, reservation_id: str, now: float) -> float | None:
        """End the lease if it is due. Delete the reservation if it can no longer be settled."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return None
        if reservation.holding and reservation.expires_at > now:
            return reservation.expires_at
        self._return_holds(reservation)
        if reservation.forget_at > now:
            return reservation.forget_at
        del self._reservations[reservation_id]
        return None

    def _sweep_bucket(self, key: str, now: float) -> float | None:
        empty_at = self._buckets[key].empty_at
        if empty_at > now:
            return max(empty_at, now + LOOK_AGAIN_SECONDS)
        del self._buckets[key]
        return None

    def _sweep_account(self, key: str, now: float) -> float | None:
        account = self._accounts[key]
        if account.forget_at > now:
            return account.forget_at
        if account.held:  # reservations with an extended lease still hold amounts
            return now + HELD_RETRY_SECONDS
        del self._accounts[key]
        return None

    def _sweep_slices(self, which: str, now: float) -> float | None:
        tenant, _, owner = which.partition("/")
        return self._slices.sweep((tenant, owner), now)

    async def get(self, key: str) -> bytes | None:
        """Return a blob, and mark it as the most recently used one."""
        value, expires_at = self._blobs.get(key, (None, 0.0))
        if value is None:
            return None
        if expires_at <= self._clock():
            self._drop_blob(key)
            return None
        self._blobs.move_to_end(key)
        return value

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None:
        """Store a blob. Evicts the least recently used blobs until the new blob fits."""
        if key in self._blobs:
            self._drop_blob(key)
        if len(key) + len(value) > self._blob_bytes:
            return
        self._blobs[key] = (value, self._clock() + ttl_seconds)
        self._blob_bytes_free -= len(key) + len(value)
        while self._blob_bytes_free < 0:
            self._drop_blob(next(iter(self._blobs)))

    def _drop_blob(self, key: str) -> None:
        value, _ = self._blobs.pop(key)
        self._blob_bytes_free += len(key) + len(value)

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        return self._documents.put(tenant, name, document, ttl_seconds, max_bytes)

    async def get_document(self, tenant: str, name: str) -> Document | None:
        return self._documents.get(tenant, name)

    async def get_heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        return self._documents.heads(tenant, names)

    async def delete_document(self, tenant: str, name: str) -> bool:
        return self._documents.delete(tenant, name)

    async def list_documents(
        self, tenant: str, folder: str, *, after: str | None = None, limit: int, newest_first: bool = False
    ) -> list[str]:
        return self._documents.names(tenant, folder, after, limit, newest_first)

    async def keep_folder(self, tenant: str, folder: str, *, ttl_seconds: float) -> None:
        self._documents.keep_folder(tenant, folder, ttl_seconds)

    async def delete_some_documents(self, tenant: str) -> int:
        return self._documents.delete_some(tenant)

    async def put_key(self, record: KeyRecord) -> None:
        self._keys[record.id] = record

    async def change_key(self, record: KeyRecord) -> bool:
        stored = self._keys.get(record.id)
        if record.revision != (0 if stored is None else stored.revision + 1):
            return False
        self._keys[record.id] = record
        return True

    async def get_key(self, key_id: str) -> KeyRecord | None:
        return self._keys.get(key_id)

    async def list_keys(self) -> list[KeyRecord]:
        return [self._keys[key_id] for key_id in sorted(self._keys)]

    async def change_record(self, record: StoredRecord) -> bool:
        return self._records.change(record)

    async def records_since(self, position: str) -> RecordChanges:
        return self._records.since(position)

    async def publish_and_read(self, message: bytes, after: str) -> tuple[list[bytes], str]:
        """Do nothing, and return no messages, because no other process can share this store."""
        return [], after
