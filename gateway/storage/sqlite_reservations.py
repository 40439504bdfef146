"""Reservations in a SQLite file: the SQL of each operation, which runs inside a transaction.

This module does for SQLite what `redis.lua` does for Redis. Functions without an underscore implement the method of the
same name in `gateway.storage.base.ReservationStore`. While a reservation is open, its slots and its budgets are rows of
`holds`, and its rate charges have been poured into their buckets.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from gateway.storage import sqlite_slices as slices
from gateway.storage.base import (
    REMEMBER_SECONDS,
    Charge,
    Grant,
    RateCharge,
    Rejection,
    SlotCharge,
    SpendCharge,
)
from gateway.storage.checks import check_actual
from gateway.storage.evaluation import evaluate_account, evaluate_rate, room_before
from gateway.storage.sqlite_rows import held_by_accounts, read_bucket, save_bucket, spend, spent_amount


class _TakenCharge(msgspec.Struct, array_like=True):
    """A charge in the form that the row of a reservation stores."""

    charge: Charge
    poured_at: float  # time at which a rate was poured in; 0 for other charges


_encode = msgspec.msgpack.Encoder().encode
_decode_taken = msgspec.msgpack.Decoder(list[_TakenCharge]).decode


def reserve(
    reservation_id: str, charges: Sequence[Charge], owner: str, lease_seconds: float, now: float, db: sqlite3.Connection
) -> Grant | Rejection:
    """Evaluate all charges, then take all of them. A rejection writes nothing."""
    if _is_open(reservation_id, db):
        raise ValueError(f"reservation {reservation_id} is already open")
    left_of_each: list[int] = []
    for index, charge in enumerate(charges):
        left = _evaluate(index, charge, now, db)
        if isinstance(left, Rejection):
            return left
        left_of_each.append(left)
    _hold(reservation_id, charges, owner, lease_seconds, now, db)
    return Grant(tuple(left_of_each))


def force_reserve(
    reservation_id: str, charges: Sequence[Charge], owner: str, lease_seconds: float, now: float, db: sqlite3.Connection
) -> None:
    """Take all charges without evaluating them, unless the reservation exists."""
    if not _is_open(reservation_id, db):
        _hold(reservation_id, charges, owner, lease_seconds, now, db)


def remaining(charges: Sequence[Charge], now: float, db: sqlite3.Connection) -> tuple[int, ...]:
    """Return the amount left of each charge's limit."""
    return tuple([room_before(charge, _evaluate(0, charge, now, db, slices_are_left=True)) for charge in charges])


def extend_lease(reservation_id: str, lease_seconds: float, now: float, db: sqlite3.Connection) -> bool:
    """Change the end of the lease in the reservation's row and in its holds."""
    query = "SELECT charges FROM reservations WHERE id = ? AND expires_at > ?"
    row = db.execute(query, (reservation_id, now)).fetchone()
    if row is None:
        return False
    expires_at = now + lease_seconds
    db.execute(
        "UPDATE reservations SET expires_at = ?, forget_at = ? WHERE id = ?",
        (expires_at, expires_at + REMEMBER_SECONDS, reservation_id),
    )
    for key in _held_keys(row[0]):
        query = "UPDATE holds SET expires_at = ? WHERE key = ? AND reservation = ?"
        db.execute(query, (expires_at, key, reservation_id))
    return True


def release_slots(reservation_id: str, now: float, db: sqlite3.Connection) -> bool:
    """Delete the reservation's holds on slots."""
    query = "SELECT charges FROM reservations WHERE id = ? AND expires_at > ?"
    row = db.execute(query, (reservation_id, now)).fetchone()
    taken = [] if row is None else _decode_taken(row[0])
    query = "DELETE FROM holds WHERE key = ? AND reservation = ?"
    slots = [each.charge.key for each in taken if isinstance(each.charge, SlotCharge)]
    return sum(db.execute(query, (key, reservation_id)).rowcount for key in slots) > 0


def settle(reservation_id: str, actual: Sequence[int], now: float, db: sqlite3.Connection) -> bool:
    """Delete the reservation and its holds, settle its rates, and add the spent amounts to its budgets."""
    query = "SELECT charges FROM reservations WHERE id = ? AND forget_at > ?"
    row = db.execute(query, (reservation_id, now)).fetchone()
    if row is None:
        return False
    taken = _decode_taken(row[0])
    check_actual(reservation_id, actual, charges=len(taken))
    db.execute("DELETE FROM reservations WHERE id = ?", (reservation_id,))
    for each, used in zip(taken, actual, strict=True):
        charge = each.charge
        if isinstance(charge, RateCharge):
            bucket = read_bucket(charge.key, db)
            bucket.settle(used, charge, each.poured_at, now)
            save_bucket(charge.key, bucket, db)
            continue
        db.execute("DELETE FROM holds WHERE key = ? AND reservation = ?", (charge.key, reservation_id))
        if isinstance(charge, SpendCharge):
            spend(charge, used, now, db)
    return True


def expire_leases(owner: str, now: float, db: sqlite3.Connection) -> int:
    """End the leases of all of an owner's reservations, and delete their holds."""
    query = "SELECT id, charges FROM reservations WHERE owner = ? AND expires_at > ?"
    rows = db.execute(query, (owner, now)).fetchall()
    for reservation_id, charges in rows:
        db.execute("UPDATE reservations SET expires_at = ? WHERE id = ?", (now, reservation_id))
        for key in _held_keys(charges):
            db.execute("DELETE FROM holds WHERE key = ? AND reservation = ?", (key, reservation_id))
    return len(rows) + slices.expire_slices(owner, now, db)


def _is_open(reservation_id: str, db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM reservations WHERE id = ?", (reservation_id,)).fetchone() is not None


def _evaluate(
    index: int, charge: Charge, now: float, db: sqlite3.Connection, *, slices_are_left: bool = False
) -> int | Rejection:
    if isinstance(charge, RateCharge):
        held = slices.held_by_rates(charge.key, now, db)
        return evaluate_rate(index, charge, read_bucket(charge.key, db), now, 0 if slices_are_left else held)
    held = held_by_accounts(charge.key, now, db, slices_are_left=slices_are_left)
    return evaluate_account(index, charge, spent_amount(charge.key, now, db), held)


def _hold(
    reservation_id: str, charges: Sequence[Charge], owner: str, lease_seconds: float, now: float, db: sqlite3.Connection
) -> None:
    expires_at = now + lease_seconds
    taken = [_TakenCharge(charge, _take(reservation_id, charge, expires_at, now, db)) for charge in charges]
    db.execute(
        "INSERT INTO reservations VALUES (?, ?, ?, ?, ?)",
        (reservation_id, owner, _encode(taken), expires_at, expires_at + REMEMBER_SECONDS),
    )


def _take(reservation_id: str, charge: Charge, expires_at: float, now: float, db: sqlite3.Connection) -> float:
    """Take one charge. Returns the time at which a rate was poured in, or 0 for other charges."""
    if isinstance(charge, RateCharge):
        bucket = read_bucket(charge.key, db)
        bucket.pour(charge.amount, charge, now)
        save_bucket(charge.key, bucket, db)
        return bucket.time
    db.execute("INSERT INTO holds VALUES (?, ?, ?, ?)", (charge.key, reservation_id, charge.amount, expires_at))
    return 0.0


def _held_keys(charges: bytes) -> list[str]:
    return [taken.charge.key for taken in _decode_taken(charges) if not isinstance(taken.charge, RateCharge)]
