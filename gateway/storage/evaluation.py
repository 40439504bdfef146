"""Checks whether a charge fits its limit: computes the amount that would remain, or a rejection.

The memory and SQLite engines use this module. The function `evaluate` in `redis.lua` has the same arithmetic.
"""

from __future__ import annotations

import math

from gateway.storage.base import HELD_RETRY_SECONDS, Charge, RateCharge, Rejection, SlotCharge, SpendCharge
from gateway.storage.leaky_bucket import LeakyBucket


def evaluate_rate(index: int, charge: RateCharge, bucket: LeakyBucket, now: float, held: int = 0) -> int | Rejection:
    """Return the amount left of a rate limit after the charge, or the rejection of the charge with this index.

    `held` is the unused part of the slices of the limit.
    """
    room = bucket.room(charge, now)
    if charge.amount <= room - held:
        return int(room - held - charge.amount)
    seconds = (charge.amount - room) * charge.period_seconds / charge.limit
    if held:
        seconds = max(seconds, HELD_RETRY_SECONDS)
    return Rejection(index, max(0, math.floor(room - held)), seconds if charge.amount <= charge.limit else None)


def evaluate_account(index: int, charge: SlotCharge | SpendCharge, spent: int, held: int) -> int | Rejection:
    """Return the amount left of a budget or slot limit after the charge, or the rejection of the charge.

    The slots of a limit are also an account. Each reservation holds one unit, and no unit is ever spent. `index` is the
    charge's position in its reservation.
    """
    room, amount = charge.limit - spent - held, charge.amount
    if amount <= room:
        return room - amount
    return Rejection(index, max(0, room), HELD_RETRY_SECONDS if spent + amount <= charge.limit else None)


def room_before(charge: Charge, verdict: int | Rejection) -> int:
    """Return the amount left before the charge, computed from the result of its evaluation."""
    return verdict.remaining if isinstance(verdict, Rejection) else verdict + charge.amount
