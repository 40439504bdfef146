"""Buckets, accounts and holds in a SQLite file, for reservations and slices. All functions run inside a transaction."""

from __future__ import annotations

import sqlite3

import msgspec

from gateway.storage.base import LEASE_SECONDS_MAX, SpendCharge
from gateway.storage.leaky_bucket import LeakyBucket, State
from gateway.storage.slices import UNUSED

_encode = msgspec.msgpack.Encoder().encode
_decode_bucket = msgspec.msgpack.Decoder(State).decode


def read_bucket(key: str, db: sqlite3.Connection) -> LeakyBucket:
    """Return the bucket of a rate, or a new one if it does not exist."""
    row = db.execute("SELECT state FROM buckets WHERE key = ?", (key,)).fetchone()
    return LeakyBucket() if row is None else LeakyBucket(*_decode_bucket(row[0]))


def save_bucket(key: str, bucket: LeakyBucket, db: sqlite3.Connection) -> None:
    """Store a bucket."""
    db.execute("REPLACE INTO buckets VALUES (?, ?, ?)", (key, _encode(bucket.state), bucket.empty_at))


def spent_amount(key: str, now: float, db: sqlite3.Connection) -> int:
    """Return the spent amount of a budget. 0 for slots."""
    row = db.execute("SELECT spent FROM accounts WHERE key = ? AND forget_at > ?", (key, now)).fetchone()
    return 0 if row is None else int(row[0])


def held_by_accounts(key: str, now: float, db: sqlite3.Connection, *, slices_are_left: bool = False) -> int:
    """Return what reservations and slices hold of a budget or of slots, or only what calls hold."""
    query = "SELECT coalesce(sum(amount), 0) FROM holds WHERE key = ? AND expires_at > ? AND expires_at <= ?"
    if slices_are_left:
        query += f" AND substr(reservation, {-len(UNUSED)}) <> '{UNUSED}'"
    return int(db.execute(query, (key, now, now + LEASE_SECONDS_MAX)).fetchone()[0])


def spend(charge: SpendCharge, used: int, now: float, db: sqlite3.Connection) -> None:
    """Add to the spent amount of a budget."""
    db.execute("DELETE FROM accounts WHERE key = ? AND forget_at <= ?", (charge.key, now))
    db.execute(
        "INSERT INTO accounts VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE"
        " SET spent = spent + excluded.spent, forget_at = max(forget_at, excluded.forget_at)",
        (charge.key, used, now + charge.keep_seconds),
    )
