"""Ports of the shared state: what must be atomic, and what may be relied on.

A storage engine is one file with one class that offers all ports; the contract suite runs over every engine.
Amounts are integers (requests, tokens, or billionths of a currency unit), times are seconds since the epoch.
An engine that can not be reached raises `StorageUnavailable` within `OPERATION_TIMEOUT_SECONDS`; nothing waits longer.
Whether the operation took place is then unknown.

The keys of a reservation's charges and its id have the same first part, `tenant/...`: a clustered store keeps what
begins alike on one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol, final

import msgspec

OPERATION_TIMEOUT_SECONDS = 0.25
HELD_RETRY_SECONDS = 1.0  # nobody knows when a call ends: what is held by others is worth asking for again so soon
REMEMBER_SECONDS = 3600.0
LEASE_SECONDS_MAX = 3600.0  # one that lasts longer by now was given by a clock that has been set back since: it is over
CLOCK_STEP_SECONDS = 5.0  # callers' times may be out of order by less; what is further back is a clock that was set
MAX_AMOUNT = 2**63 - 1
DEFAULT_BLOB_BYTES = 128 * 2**20
DEFAULT_DOCUMENT_BYTES = 128 * 2**20  # in memory
DISK_DOCUMENT_BYTES = 8 * 2**30
DELETED_AT_ONCE = 100  # documents: others wait for the operation
NOTICES_KEPT = 1000  # about: an engine may forget a hundred later
NOTICES_AT_ONCE = 64


@final
class RateCharge(msgspec.Struct, frozen=True, tag=True):
    """`amount` of a limit that refills steadily: at most `limit` at once, `limit` per `period_seconds` in the long run.

    A generic cell rate algorithm (see `bucket`). Settling returns what was not used, as far as it has not refilled
    meanwhile; or takes what was used beyond it, and may so drive the state into debt: later calls then wait for it.
    An amount above `limit` can never be granted.
    """

    key: str
    amount: int
    limit: int
    period_seconds: float


@final
class LeaseCharge(msgspec.Struct, frozen=True, tag=True):
    """One of at most `limit` places that are held until settled, or until the lease runs out."""

    amount: ClassVar[int] = 1

    key: str
    limit: int


@final
class SpendCharge(msgspec.Struct, frozen=True, tag=True):
    """`amount` of an account that only fills up: spent + held may not pass `limit`.

    The key names its calendar period, so that a new period is a new account; it is forgotten `keep_seconds` after
    its last change (`math.inf`: never). Exact to the last unit below 2**63.
    """

    key: str
    amount: int
    limit: int
    keep_seconds: float


Charge = RateCharge | LeaseCharge | SpendCharge


@final
class Granted(msgspec.Struct, frozen=True):
    """All charges are reserved. `remaining[i]` is what is left of charge i now."""

    remaining: tuple[int, ...]


@final
class Refused(msgspec.Struct, frozen=True):
    """Nothing was reserved and nothing was written: `index` is the first charge that did not fit.

    `retry_after_seconds` is None where waiting does not help (a spent account, an amount above the limit). Where
    others hold what is missing, it is `HELD_RETRY_SECONDS`.
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
        ValueError where the id is open already, or a key stands twice in the charges.
        """

    async def adopt(self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float) -> None:
        """Hold what was granted elsewhere, whether it fits or not. A reservation that is open stays as it is."""

    async def left(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        """What could be reserved now of each, whatever their amounts. Reserves nothing. All are of one tenant."""

    async def extend(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        """Keep a reservation alive. False when it is gone, by settling or by running out."""

    async def leave(self, reservation_id: str, *, now: float) -> bool:
        """The work is over, its bill not yet settled: free its places (`LeaseCharge`), and hold on to all else.

        True for the one call that freed them.
        """

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        """Replace each reserved amount by the actual one (ignored for leases) and end the reservation.

        True for the one call that ended it; False for every later call, which changes nothing. A reservation that
        ran out is settled like any other for another `REMEMBER_SECONDS`: what was used in the meantime is not lost.
        """

    async def release_owner(self, owner: str, *, now: float) -> int:
        """Let every lease of this owner run out at once, and say how many did.

        For a process that starts under the name of one that was killed; `open` does it for the engine's own owner.
        A reservation that the other one settles after all, still counts: it merely ran out.
        """

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        """Say that the engine's owner lives; how many owners have said so in the last `alive_seconds`, itself included.

        Without an owner: how many others. Memory knows of its own process alone.
        """


class Blobs(Protocol):
    """A bounded cache of byte strings. Anything may be gone at any time; what is returned is what was put."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None: ...


class Document(msgspec.Struct, frozen=True):
    """The head is read again and again, with those of other documents; the body seldom, and alone."""

    head: bytes
    body: bytes


class Documents(Protocol):
    """What tenants keep for a time, under names of their own. Unlike a blob it is in nobody's way: what is put is there
    until its time is over, or it is deleted. Only where a tenant's together have more bytes than it may have, the
    oldest make room; and where those of all have more than the engine holds, the oldest of the tenant that has most.
    (Redis holds what its memory does.)
    """

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        """Whole or not at all; False where it alone has more bytes than there may be. `max_bytes` is the tenant's."""

    async def get_document(self, tenant: str, name: str) -> Document | None: ...

    async def get_heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """In the order of the names, by one operation."""

    async def delete_document(self, tenant: str, name: str) -> bool:
        """False where there was none."""

    async def delete_some_documents(self, tenant: str) -> int:
        """As many of the tenant's as one operation should take, at most `DELETED_AT_ONCE`: how many. Fewer: it had no
        more.
        """


class KeyRecord(msgspec.Struct, frozen=True):
    """An API key as it is kept: never the secret. A hash is `hmac-sha256:<hex>` (see `gateway.core.api_keys`)."""

    id: str
    tenant: str
    hash: str
    created: str  # RFC 3339, as all times here
    expires: str | None = None
    revoked: bool = False
    models: tuple[str, ...] | None = None  # None: all models
    classes: tuple[str, ...] | None = None  # None: all latency classes
    limits: dict[str, Any] | None = None  # as a policy has them, in JSON's types
    old_hash: str | None = None  # of the secret before the last rotation ...
    old_expires: str | None = None  # ... which is valid until then
    revision: int = 0  # counts the changes


class Keys(Protocol):
    async def put_key(self, record: KeyRecord) -> None:
        """Add a key or replace the one of the same id."""

    async def change_key(self, record: KeyRecord) -> bool:
        """Replace the revision before this one, or add the key where this is revision 0; False where that is not what
        is kept: somebody else was faster, or the id is taken."""

    async def get_key(self, key_id: str) -> KeyRecord | None: ...

    async def list_keys(self) -> list[KeyRecord]:
        """All keys, revoked ones too, by id."""


class Notices(Protocol):
    """What processes tell each other, at best: nobody's answer may depend on it."""

    has_others: ClassVar[bool]  # whether other processes can use the same store at all

    async def exchange(self, notice: bytes, after: str) -> tuple[list[bytes], str]:
        """Tell all others, where the notice is not empty, and hear what was told after that mark; `""` is before all
        that is kept. In order, one's own included; at most `NOTICES_AT_ONCE` of them, and the mark to go on from. Of
        more than `NOTICES_KEPT`, the oldest are forgotten. Memory has nobody to tell, and hears nothing."""


class Storage(Counters, Blobs, Documents, Keys, Notices, Protocol):
    """One engine, made by `engine(url, owner=...)`. `open` before use, `close` after; both are safe to call twice.

    `owner` names the process to `release_owner`, and is the same after a restart; no two live processes share one.
    """

    async def open(self) -> None: ...

    async def close(self) -> None: ...


def check_charges(reservation_id: str, charges: Sequence[Charge]) -> None:
    """What every engine relies on; ValueError where a caller broke it."""
    _check_keys(first_part(reservation_id), tuple([charge.key for charge in charges]))
    amounts = [charge.amount for charge in charges]
    if amounts and not (min(amounts) >= 0 and max(amounts) <= MAX_AMOUNT):
        raise ValueError(f"an amount is outside 0..2**63-1: {', '.join(map(repr, charges))}")


@lru_cache(maxsize=10_000)  # a caller comes with the same ones again and again
def _check_keys(tenant: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        if first_part(key) != tenant:
            raise ValueError(f"the charge {key!r} and the reservation, of {tenant!r}, begin with different tenants")
    if len(set(keys)) != len(keys):
        raise ValueError(f"a key stands twice in the charges: {', '.join(keys)}")


def check_actual(reservation_id: str, actual: Sequence[int], *, charges: int | None = None) -> None:
    if charges is not None and len(actual) != charges:
        raise ValueError(f"{reservation_id} has {charges} charges, and is settled with {len(actual)} amounts")
    if actual and not (min(actual) >= 0 and max(actual) <= MAX_AMOUNT):
        raise ValueError(f"{reservation_id} is settled with an amount outside 0..2**63-1: {actual}")


def first_part(key: str) -> str:
    return key.partition("/")[0]
