"""Ports of the shared state: what must be atomic, and what may be relied on.

A storage engine is one file with one class that offers all three ports; the contract suite runs over every engine.
Amounts are integers (requests, tokens, or billionths of a currency unit), times are seconds since the epoch.
An engine that can not be reached raises `StorageUnavailable` within `OPERATION_TIMEOUT_SECONDS`; nothing waits longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

OPERATION_TIMEOUT_SECONDS = 0.25


class RateCharge(msgspec.Struct, frozen=True, tag=True):
    """`amount` of a limit that refills steadily: at most `limit` at once, `limit` per `period_seconds` in the long run.

    A generic cell rate algorithm: the state is one time per key. Settling returns (or takes) the difference to
    what was really used, and may drive the state into debt: later calls then wait for it.
    An amount above `limit` can never be granted.
    """

    key: str
    amount: int
    limit: int
    period_seconds: float


class LeaseCharge(msgspec.Struct, frozen=True, tag=True):
    """One of at most `limit` places that are held until settled, or until the lease runs out."""

    key: str
    limit: int


class SpendCharge(msgspec.Struct, frozen=True, tag=True):
    """`amount` of an account that only fills up: spent + held may not pass `limit`.

    The key names its calendar period, so that a new period is a new account; it is forgotten `keep_seconds` after
    its last change.
    """

    key: str
    amount: int
    limit: int
    keep_seconds: float


Charge = RateCharge | LeaseCharge | SpendCharge


class Granted(msgspec.Struct, frozen=True):
    """All charges are reserved. `remaining[i]` is what is left of charge i now."""

    remaining: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True):
    """Nothing was reserved and nothing was written: `index` is the first charge that did not fit.

    `retry_after_seconds` is None where waiting does not help (a spent account, an amount above the limit).
    """

    index: int
    remaining: int
    retry_after_seconds: float | None


class Counters(Protocol):
    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Granted | Refused:
        """Take all charges or none, in one atomic step, as seen by every process on the same store.

        The reservation is a lease: when it is neither settled nor extended for `lease_seconds`, its places and its
        held money return by themselves (a rate has no such part: it refills anyway).
        """

    async def extend(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        """Keep a reservation alive. False when it is gone, by settling or by running out."""

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        """Replace each reserved amount by the actual one (ignored for leases) and end the reservation.

        True for the one call that ended it; False for every later call, which changes nothing. A reservation that
        ran out is settled like any other as long as the store remembers it, at least for another lease time.
        """


class Blobs(Protocol):
    """A bounded cache of byte strings. Anything may be gone at any time; what is returned is what was put."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None: ...


class KeyRecord(msgspec.Struct, frozen=True):
    """An API key as it is kept: never the secret. `hash` is `hmac-sha256:<hex>` (see `gateway.auth`)."""

    id: str
    tenant: str
    hash: str
    created: str  # RFC 3339
    expires: str | None = None
    revoked: bool = False
    models: tuple[str, ...] | None = None  # None: all models


class Keys(Protocol):
    async def put_key(self, record: KeyRecord) -> None:
        """Add a key or replace the one of the same id."""

    async def get_key(self, key_id: str) -> KeyRecord | None: ...

    async def list_keys(self) -> list[KeyRecord]:
        """All keys, revoked ones too, by id."""


class Storage(Counters, Blobs, Keys, Protocol):
    """One engine. `open` before use, `close` after; both are safe to call twice."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...
