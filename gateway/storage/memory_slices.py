"""Slices of limits in the memory engine: the holds of all gateways' slices, and the records of their reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.storage.base import (
    SLICE_MEMORY_SECONDS,
    Charge,
    RateCharge,
    SliceGrant,
    SliceReport,
    SpendCharge,
)
from gateway.storage.leaky_bucket import LeakyBucket
from gateway.storage.slices import SliceRecord, apply_report, count_as_used


class Account(Protocol):
    """The account of a budget or of slots."""

    spent: int
    held: int


class _Hold(msgspec.Struct, frozen=True):
    charge: Charge
    unused: int
    reserved: int


class _TenantSlices(msgspec.Struct):
    record: SliceRecord
    expires_at: float
    forget_at: float


class MemorySlices:
    """The slices of all gateways on one store in memory. Not thread-safe.

    `bucket` returns the bucket of a key; its second argument is the present time. `account` returns the account of a
    key, and keeps it until its second argument at least. Both create what does not exist.
    """

    def __init__(self, bucket: Callable[[str, float], LeakyBucket], account: Callable[[str, float], Account]) -> None:
        self.bucket_of = bucket
        self.account_of = account
        self._tenants: dict[tuple[str, str], _TenantSlices] = {}  # by tenant and owner
        self._holds: dict[str, dict[tuple[str, str], _Hold]] = {}  # by the key of the limit, then by tenant and owner

    def has_holds(self) -> bool:
        """Return whether there are slices at all."""
        return bool(self._holds)

    def unused(self, key: str) -> int:
        """Return the unused part of all slices of a limit."""
        holds = self._holds.get(key)
        return sum([hold.unused for hold in holds.values()]) if holds else 0

    def report(self, tenant: str, owner: str, report: SliceReport, lease_seconds: float, now: float) -> SliceGrant:
        """Apply a report. The caller ends the leases that are due before."""
        return apply_report(_Tables(self, (tenant, owner), lease_seconds, now), report, now)

    def settled_receipt(self, tenant: str, owner: str) -> str | None:
        slices = self._tenants.get((tenant, owner))
        return None if slices is None else slices.record.receipt

    def load(self, which: tuple[str, str]) -> SliceRecord | None:
        """Return the record of a gateway and a tenant."""
        slices = self._tenants.get(which)
        return None if slices is None else slices.record

    def save(self, which: tuple[str, str], record: SliceRecord, lease_seconds: float, now: float) -> None:
        """Replace a record, and renew the lease."""
        self._tenants[which] = _TenantSlices(record, now + lease_seconds, now + SLICE_MEMORY_SECONDS)

    def hold(self, which: tuple[str, str], charge: Charge, unused: int, reserved: int, forget_at: float) -> None:
        """Begin the slice of one limit."""
        self._holds.setdefault(charge.key, {})[which] = _Hold(charge, unused, reserved)
        if not isinstance(charge, RateCharge):
            self.account_of(charge.key, forget_at).held += unused + reserved

    def take_back(self, which: tuple[str, str], key: str, now: float, *, counts_as_used: bool) -> bool:
        """End the slice of one limit. Returns False if it has ended before."""
        holds = self._holds.get(key, {})
        hold = holds.pop(which, None)
        if hold is None:
            return False
        if not holds:
            del self._holds[key]
        if not isinstance(hold.charge, RateCharge):
            self.account_of(key, now).held -= hold.unused + hold.reserved
        elif counts_as_used:
            expires_at = self._tenants[which].expires_at
            count_as_used(self.bucket_of(key, now), hold.charge, hold.unused, expires_at, now)
        return True

    def sweep(self, which: tuple[str, str], now: float) -> float | None:
        """End the lease of slices if it is due, and forget the record if it is old. Returns the next due time."""
        slices = self._tenants[which]
        if slices.expires_at > now:
            return slices.expires_at
        self._end(which, now)
        if slices.forget_at > now:
            return slices.forget_at
        del self._tenants[which]
        return None

    def expire(self, owner: str, now: float) -> int:
        """End the slices of one owner. Returns the number of tenants whose slices ended."""
        return sum([self._end(which, now) for which in self._tenants if which[1] == owner])

    def _end(self, which: tuple[str, str], now: float) -> bool:
        slices = self._tenants[which]
        ended = [self.take_back(which, each.key, now, counts_as_used=True) for each in slices.record.charges]
        slices.expires_at = min(slices.expires_at, now)
        return any(ended)


class _Tables:
    """The `SliceTables` of one report."""

    def __init__(self, slices: MemorySlices, which: tuple[str, str], lease_seconds: float, now: float) -> None:
        self._slices = slices
        self._which = which
        self._lease_seconds = lease_seconds
        self._now = now

    def load(self) -> SliceRecord | None:
        return self._slices.load(self._which)

    def save(self, record: SliceRecord) -> None:
        self._slices.save(self._which, record, self._lease_seconds, self._now)

    def take_back(self, charge: Charge, *, counts_as_used: bool) -> bool:
        return self._slices.take_back(self._which, charge.key, self._now, counts_as_used=counts_as_used)

    def bucket(self, charge: RateCharge) -> LeakyBucket:
        return self._slices.bucket_of(charge.key, self._now)

    def save_bucket(self, charge: RateCharge, bucket: LeakyBucket) -> None:
        pass  # `bucket` is the stored object itself

    def spend(self, charge: SpendCharge, amount: int) -> None:
        self._slices.account_of(charge.key, self._forget_at(charge)).spent += amount

    def room(self, charge: Charge) -> int:
        if isinstance(charge, RateCharge):
            room = self._slices.bucket_of(charge.key, self._now).room(charge, self._now)
            return int(room // 1) - self._slices.unused(charge.key)
        account = self._slices.account_of(charge.key, self._forget_at(charge))
        return charge.limit - account.spent - account.held

    def hold(self, charge: Charge, unused: int, reserved: int) -> None:
        self._slices.hold(self._which, charge, unused, reserved, self._forget_at(charge))

    def _forget_at(self, charge: Charge) -> float:
        return self._now + (charge.keep_seconds if isinstance(charge, SpendCharge) else self._lease_seconds)
