"""Does a charge fit? The arithmetic that the engines written in Python share; `redis.lua` says the same."""

from __future__ import annotations

import math

from gateway.storage.base import HELD_RETRY_SECONDS, Charge, RateCharge, Rejection, SlotCharge, SpendCharge
from gateway.storage.leaky_bucket import LeakyBucket


def evaluate_rate(index: int, charge: RateCharge, bucket: LeakyBucket, now: float) -> int | Rejection:
    """What would be left after the charge, or why it can not be."""
    room = bucket.room(charge, now)
    if charge.amount <= room:
        return int(room - charge.amount)
    seconds = (charge.amount - room) * charge.period_seconds / charge.limit
    return Rejection(index, max(0, math.floor(room)), seconds if charge.amount <= charge.limit else None)


def evaluate_account(index: int, charge: SlotCharge | SpendCharge, spent: int, held: int) -> int | Rejection:
    """As above. A place is an account too, of which each reservation holds one and nothing is ever spent."""
    room, amount = charge.limit - spent - held, charge.amount
    if amount <= room:
        return room - amount
    return Rejection(index, max(0, room), HELD_RETRY_SECONDS if spent + amount <= charge.limit else None)


def room_before(charge: Charge, verdict: int | Rejection) -> int:
    """What there was before the charge."""
    return verdict.remaining if isinstance(verdict, Rejection) else verdict + charge.amount
