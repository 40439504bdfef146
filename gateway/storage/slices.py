"""Applies reports about slices of limits, for the memory and SQLite engines. `redis.lua` has the same arithmetic.

`ReservationStore.report_slices` in `base` is the contract. `apply_report` is the operation; an engine implements
`SliceTables` for its own tables. While a gateway has a slice of a budget or of slots, the slice is part of the held
amount of the account, in two holds: what calls in flight have reserved, and what is unused. A slice of a rate is a hold
beside the bucket, because a bucket leaks and a slice does not. The used part of a slice moves from the hold into the
bucket when it is reported. So what the bucket contains and what slices hold never exceed the limit together, and
reporting late never lets a rate be exceeded.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from gateway.storage.base import (
    SLICE_SHARE,
    Charge,
    RateCharge,
    SliceGrant,
    SliceReport,
    SliceUse,
    SpendCharge,
)
from gateway.storage.leaky_bucket import LeakyBucket

UNUSED = "/unused"  # the end of the ids of holds for the unused parts of slices


class SliceRecord(msgspec.Struct, frozen=True):
    """What the store remembers of a gateway's last report about a tenant."""

    process: str
    number: int
    receipt: str
    grant: SliceGrant
    charges: tuple[Charge, ...]  # the limits of which the gateway has slices


class SliceTables(Protocol):
    """The tables of an engine, for one report of one gateway. The gateway's slices are meant where none are named."""

    def load(self) -> SliceRecord | None:
        """Return the record of the last report. None if there is none."""

    def save(self, record: SliceRecord) -> None:
        """Replace the record, and renew the lease of all slices."""

    def take_back(self, charge: Charge, *, counts_as_used: bool) -> bool:
        """End the slice of one limit. The unused part of a rate may count as used, and then goes into the bucket.

        Returns False if its lease has ended before, and other operations have ended it.
        """

    def bucket(self, charge: RateCharge) -> LeakyBucket:
        """Return the bucket of a rate, to be changed and then saved."""

    def save_bucket(self, charge: RateCharge, bucket: LeakyBucket) -> None:
        """Store a changed bucket."""

    def spend(self, charge: SpendCharge, amount: int) -> None:
        """Add to the spent amount of a budget."""

    def room(self, charge: Charge) -> int:
        """Return what is left of a limit, which is negative if it is exceeded."""

    def hold(self, charge: Charge, unused: int, reserved: int) -> None:
        """Begin the slice of one limit."""


def apply_report(tables: SliceTables, report: SliceReport, now: float) -> SliceGrant:
    """Take back all slices, charge what was used, and begin the slices again with what the limits allow."""
    last = tables.load()
    if last is not None and (last.process, last.number) == (report.process, report.number):
        return last.grant
    renewed = {use.charge.key for use in report.uses} if last is not None and last.process == report.process else set()
    lapsed: set[str] = set()
    for charge in last.charges if last is not None else ():
        if not tables.take_back(charge, counts_as_used=charge.key not in renewed) and charge.key in renewed:
            lapsed.add(charge.key)  # the slice of a rate then counts as used already
    results = [_apply_use(tables, use, use.charge.key in lapsed, report.replicas, now) for use in report.uses]
    granted, remaining, used_at = zip(*results, strict=True) if results else ((), (), ())
    grant = SliceGrant(granted, remaining, used_at)
    receipt = report.receipt or (last.receipt if last is not None else "")
    # A slice that holds nothing is not there, so its lease cannot end.
    held = zip(report.uses, granted, strict=True)
    charges = tuple([use.charge for use, growth in held if use.unused or use.reserved or growth])
    tables.save(SliceRecord(report.process, report.number, receipt, grant, charges))
    return grant


def _apply_use(tables: SliceTables, use: SliceUse, lapsed: bool, replicas: int, now: float) -> tuple[int, int, float]:
    """Apply the report about one slice. Returns its growth, what is left of the limit, and `used_at`."""
    charge, used_at = use.charge, 0.0
    if isinstance(charge, RateCharge):
        used_at = now
        if use.used or use.refunds:
            bucket = tables.bucket(charge)
            for poured_at, amount in use.refunds:
                bucket.settle(0, msgspec.structs.replace(charge, amount=amount), poured_at, now)
            if use.used and not lapsed:
                bucket.pour(use.used, charge, now)
                used_at = bucket.time
            tables.save_bucket(charge, bucket)
    elif isinstance(charge, SpendCharge) and use.used:
        tables.spend(charge, use.used)
    room = tables.room(charge)
    growth = slice_growth(use, room, replicas)
    if use.unused or use.reserved or growth:
        tables.hold(charge, use.unused + growth, use.reserved)
    return growth, max(0, room - use.reserved - use.unused - growth), used_at


def slice_growth(use: SliceUse, room: int, replicas: int) -> int:
    """Return by how much a slice may grow if `room` is left of its limit without the slice.

    Calls that wait get what they need. Beyond that, the slice may have its share of what no call uses.
    """
    free = room - use.reserved
    share = free // (SLICE_SHARE * replicas)
    return max(0, min(use.wanted, free - use.unused, max(use.needed, share - use.unused)))


def count_as_used(bucket: LeakyBucket, rate: RateCharge, unused: int, expires_at: float, now: float) -> None:
    """Pour the slice of a rate into its bucket, at the end of its lease if that is over."""
    if unused:
        bucket.pour(unused, rate, max(expires_at, bucket.time) if expires_at < now else now)
