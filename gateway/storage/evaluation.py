"""Evaluates a charge against its limit: what would be left, or a rejection.

The engines written in Python share this arithmetic. `evaluate` in `redis.lua` is its counterpart.
"""

from __future__ import annotations

import math

from gateway.storage.base import HELD_RETRY_SECONDS, Charge, RateCharge, Rejection, SlotCharge, SpendCharge
from gateway.storage.leaky_bucket import LeakyBucket


def evaluate_rate(index: int, charge: RateCharge, bucket: LeakyBucket, now: float) -> int | Rejection:
    """What would be left of a rate limit after the charge, or the rejection of charge number `index`."""
    room = bucket.room(charge, now)
    if charge.amount <= room:
        return int(room - charge.amount)
    seconds = (charge.amount - room) * charge.period_seconds / charge.limit
    return Rejection(index, max(0, math.floor(room)), seconds if charge.amount <= charge.limit else None)


def evaluate_account(index: int, charge: SlotCharge | SpendCharge, spent: int, held: int) -> int | Rejection:
    """What would be left of a budget or of the slots after the charge, or the rejection of charge number `index`.

    Slots are an account, too: each reservation holds one of its units, and none is ever spent.
    """
    room, amount = charge.limit - spent - held, charge.amount
    if amount <= room:
        return room - amount
    return Rejection(index, max(0, room), HELD_RETRY_SECONDS if spent + amount <= charge.limit else None)


def room_before(charge: Charge, verdict: int | Rejection) -> int:
    """What is left before the charge, computed from the result of its evaluation."""
    return verdict.remaining if isinstance(verdict, Rejection) else verdict + charge.amount
