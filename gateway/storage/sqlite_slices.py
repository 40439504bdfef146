"""Slices of limits in a SQLite file: the SQL of each operation, which runs inside a transaction.

A gateway's slice of a budget or of slots is up to two rows of `holds`, like those of reservations. Its slice of a rate
is a row of `rate_holds`. Other gateways than the owner end slices whose lease has ended, when they evaluate the limit.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from gateway.storage.base import (
    LEASE_SECONDS_MAX,
    SLICE_MEMORY_SECONDS,
    Charge,
    RateCharge,
    SliceGrant,
    SliceReport,
    SpendCharge,
)
from gateway.storage.leaky_bucket import LeakyBucket
from gateway.storage.slices import UNUSED, SliceRecord, apply_report, count_as_used
from gateway.storage.sqlite_rows import held_by_accounts, read_bucket, save_bucket, spend, spent_amount

TABLES = """
CREATE TABLE slices (
    tenant TEXT NOT NULL, owner TEXT NOT NULL, record BLOB NOT NULL, expires_at REAL NOT NULL, forget_at REAL NOT NULL,
    PRIMARY KEY (tenant, owner)
) WITHOUT ROWID;
CREATE TABLE rate_holds (
    key TEXT NOT NULL, slice TEXT NOT NULL, amount INTEGER NOT NULL, rate BLOB NOT NULL, expires_at REAL NOT NULL,
    PRIMARY KEY (key, slice)
) WITHOUT ROWID;
"""

_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(SliceRecord).decode
_decode_rate = msgspec.msgpack.Decoder(RateCharge).decode


def report(
    tenant: str, owner: str, report: SliceReport, lease_seconds: float, now: float, db: sqlite3.Connection
) -> SliceGrant:
    """Apply a report."""
    return apply_report(_Tables(tenant, owner, lease_seconds, now, db), report, now)


def settled_receipt(tenant: str, owner: str, now: float, db: sqlite3.Connection) -> str | None:
    """Return the last receipt of an owner's reports."""
    query = "SELECT record FROM slices WHERE tenant = ? AND owner = ? AND forget_at > ?"
    row = db.execute(query, (tenant, owner, now)).fetchone()
    return None if row is None else _decode_record(row[0]).receipt


def held_by_rates(key: str, now: float, db: sqlite3.Connection) -> int:
    """Return the unused part of all slices of a rate, after ending those whose lease has ended."""
    rows = db.execute("SELECT slice, amount, rate, expires_at FROM rate_holds WHERE key = ?", (key,)).fetchall()
    held = 0
    for slice_id, amount, rate, expires_at in rows:
        if now < expires_at <= now + LEASE_SECONDS_MAX:
            held += amount
        else:
            _end(slice_id, _decode_rate(rate), amount, expires_at, now, db)
    return held


def sweep(now: float, db: sqlite3.Connection) -> None:
    """End the slices of rates whose lease has ended, and forget old records."""
    for (key,) in db.execute("SELECT DISTINCT key FROM rate_holds WHERE expires_at <= ?", (now,)).fetchall():
        held_by_rates(key, now, db)
    db.execute("DELETE FROM slices WHERE forget_at <= ?", (now,))


def expire_slices(owner: str, now: float, db: sqlite3.Connection) -> int:
    """End the slices of one owner. Returns the number of tenants whose slices ended."""
    query = "SELECT tenant, record FROM slices WHERE owner = ? AND expires_at > ?"
    rows = db.execute(query, (owner, now)).fetchall()
    for tenant, record in rows:
        tables = _Tables(tenant, owner, 0.0, now, db)
        for charge in _decode_record(record).charges:
            tables.take_back(charge, counts_as_used=True)
        db.execute("UPDATE slices SET expires_at = ? WHERE tenant = ? AND owner = ?", (now, tenant, owner))
    return len(rows)


def _end(slice_id: str, rate: RateCharge, unused: int, expires_at: float, now: float, db: sqlite3.Connection) -> None:
    """End the slice of a rate. Its unused part counts as used."""
    db.execute("DELETE FROM rate_holds WHERE key = ? AND slice = ?", (rate.key, slice_id))
    bucket = read_bucket(rate.key, db)
    count_as_used(bucket, rate, unused, expires_at, now)
    save_bucket(rate.key, bucket, db)


class _Tables:
    """The `SliceTables` of one report, in one transaction."""

    def __init__(self, tenant: str, owner: str, lease_seconds: float, now: float, db: sqlite3.Connection) -> None:
        self._tenant = tenant
        self._owner = owner
        self._id = f"{tenant}/@{owner}"
        self._expires_at = now + lease_seconds
        self._now = now
        self._db = db

    def load(self) -> SliceRecord | None:
        query = "SELECT record FROM slices WHERE tenant = ? AND owner = ? AND forget_at > ?"
        row = self._db.execute(query, (self._tenant, self._owner, self._now)).fetchone()
        return None if row is None else _decode_record(row[0])

    def save(self, record: SliceRecord) -> None:
        row = (self._tenant, self._owner, _encode(record), self._expires_at, self._now + SLICE_MEMORY_SECONDS)
        self._db.execute("REPLACE INTO slices VALUES (?, ?, ?, ?, ?)", row)

    def take_back(self, charge: Charge, *, counts_as_used: bool) -> bool:
        if isinstance(charge, RateCharge):
            query = "SELECT amount, rate, expires_at FROM rate_holds WHERE key = ? AND slice = ?"
            row = self._db.execute(query, (charge.key, self._id)).fetchone()
            if row is not None:
                unused, rate, expires_at = row
                _end(self._id, _decode_rate(rate), unused if counts_as_used else 0, expires_at, self._now, self._db)
            return row is not None
        ids: Iterable[str] = (self._id, self._id + UNUSED)
        query = "DELETE FROM holds WHERE key = ? AND reservation = ?"
        return sum([self._db.execute(query, (charge.key, each)).rowcount for each in ids]) > 0

    def bucket(self, charge: RateCharge) -> LeakyBucket:
        return read_bucket(charge.key, self._db)

    def save_bucket(self, charge: RateCharge, bucket: LeakyBucket) -> None:
        save_bucket(charge.key, bucket, self._db)

    def spend(self, charge: SpendCharge, amount: int) -> None:
        spend(charge, amount, self._now, self._db)

    def room(self, charge: Charge) -> int:
        if isinstance(charge, RateCharge):
            held = held_by_rates(charge.key, self._now, self._db)  # may change the bucket
            return int(read_bucket(charge.key, self._db).room(charge, self._now) // 1) - held
        held = held_by_accounts(charge.key, self._now, self._db)
        return charge.limit - spent_amount(charge.key, self._now, self._db) - held

    def hold(self, charge: Charge, unused: int, reserved: int) -> None:
        if isinstance(charge, RateCharge):
            row = (charge.key, self._id, unused, _encode(charge), self._expires_at)
            self._db.execute("INSERT INTO rate_holds VALUES (?, ?, ?, ?, ?)", row)
            return
        for name, amount in ((self._id, reserved), (self._id + UNUSED, unused)):
            self._db.execute("INSERT INTO holds VALUES (?, ?, ?, ?)", (charge.key, name, amount, self._expires_at))
