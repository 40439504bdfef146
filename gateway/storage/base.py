"""Interfaces of the shared storage: reservations (leases), cached blobs, documents, API keys, peer messages.

A storage engine is one class that implements all ports. The contract suite runs over every engine. Each method is one
atomic operation, as seen by every process on the same store (`expire_leases` is one per tenant). An engine belongs to
one event loop.

* Amounts are integers: requests, tokens, slots, or billionths of a currency unit. Times are seconds since the epoch.
* An operation raises `StorageUnavailable` after at most `OPERATION_TIMEOUT_SECONDS` if the store does not answer.
  Whether the operation took effect is then unknown.
* A reservation is a lease. If its gateway dies, the lease ends by itself, or by `expire_leases` when a gateway with the
  same owner name starts.
* A reservation's id and the keys of its charges begin with the same tenant, `tenant/...`. A cluster stores keys of one
  tenant on one node, so one atomic operation can change all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol, final

import msgspec

OPERATION_TIMEOUT_SECONDS = 0.25
HELD_RETRY_SECONDS = 1.0  # when a call ends is unknown, so amounts held by other calls are worth a retry this soon
REMEMBER_SECONDS = 3600.0  # how long after its lease ended a reservation can still be settled
LEASE_SECONDS_MAX = 3600.0  # a lease with more time left dates from before the clock was set back: treated as expired
CLOCK_STEP_SECONDS = 5.0  # callers' times may be out of order by less; a larger step means the clock was set back
MAX_AMOUNT = 2**63 - 1
DEFAULT_BLOB_BYTES = 128 * 2**20
DEFAULT_DOCUMENT_BYTES = 128 * 2**20  # in memory
DISK_DOCUMENT_BYTES = 8 * 2**30
DELETE_BATCH_SIZE = 100  # documents per operation: other operations wait for it
PEER_MESSAGES_KEPT = 1000  # approximately: an engine may keep a hundred more
PEER_MESSAGES_PER_READ = 64


@final
class RateCharge(msgspec.Struct, frozen=True, tag=True):
    """`amount` of a rate limit: at most `limit` in a burst, and `limit` per `period_seconds` in the long run.

    The limit refills steadily, by the generic cell rate algorithm (see `leaky_bucket`). Settling returns the unused
    part of `amount`, as far as it has not refilled meanwhile. If more was used than reserved, settling takes the
    difference and can leave the limit in debt, which later calls wait for. An amount above `limit` is always rejected.
    """

    key: str
    amount: int
    limit: int
    period_seconds: float


@final
class SlotCharge(msgspec.Struct, frozen=True, tag="LeaseCharge"):
    """One of `limit` concurrency slots. Held until `release_slots`, `settle` or the end of the lease.

    The tag is the name under which SQLite files store it.
    """

    amount: ClassVar[int] = 1

    key: str
    limit: int


@final
class SpendCharge(msgspec.Struct, frozen=True, tag=True):
    """`amount` of a budget. Fits if it, what is spent and what open reservations hold do not exceed `limit` together.

    A budget never refills. Settling replaces the held amount by the spent one, which may exceed the limit. The key
    names the calendar period, so a new period is a new account. An account is deleted `keep_seconds` after its last
    change (`math.inf`: never). Sums are exact below 2**63.
    """

    key: str
    amount: int
    limit: int
    keep_seconds: float


Charge = RateCharge | SlotCharge | SpendCharge


@final
class Grant(msgspec.Struct, frozen=True):
    """All charges are reserved. `remaining[i]` is what is left of the limit of charge i."""

    remaining: tuple[int, ...]


@final
class Rejection(msgspec.Struct, frozen=True):
    """Nothing was reserved, because the charge at `index` (the first such one) exceeds its limit.

    `remaining` is what is left of that limit. `retry_after_seconds` is the time until a rate has refilled enough, or
    `HELD_RETRY_SECONDS` if other reservations hold the missing amount. It is None if waiting does not help: the budget
    is spent, or the amount is above the limit.
    """

    index: int
    remaining: int
    retry_after_seconds: float | None


class ReservationStore(Protocol):
    """Reservations of limits: atomic over all their charges, and leased, so that a dead gateway's amounts return.

    Life of a reservation: `reserve`, `extend_lease` while the call runs, `release_slots` when the call has ended, and
    `settle` once its actual usage is known. A lease that is not extended ends by itself.
    """

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        """Take all charges, or none.

        If the reservation is neither settled nor extended within `lease_seconds`, its slots and its held budget return
        by themselves. Rates refill anyway.
        Raises `ValueError` if the id is already reserved, or if a key occurs twice in the charges.
        """

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        """Take all charges, even beyond their limits: for calls that were admitted without the store.

        Does nothing if the reservation exists.
        """

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        """What is left of each charge's limit. Ignores the charges' amounts, reserves nothing. One tenant per call."""

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        """Let the lease end `lease_seconds` from now. False if it has ended, or the reservation was settled."""

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        """Free the slots of a call that has ended but is not billed yet. Its other charges stay reserved.

        True for the one call that freed slots.
        """

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        """Replace each reserved amount by the actual one and end the reservation. Amounts of slots are ignored.

        Idempotent: True for the one call that ended it, False for every later call. If the lease has ended, usage
        is still counted for another `REMEMBER_SECONDS`.
        """

    async def expire_leases(self, owner: str, *, now: float) -> int:
        """End all leases of a gateway that died, so that its reserved amounts return at once. Returns how many ended.

        `open` calls this for the engine's own owner, whose previous process may have been killed. If that process is
        still alive and settles a reservation later, its usage is counted, as for any lease that has ended.
        """

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        """Report the engine's owner as alive, and count the owners reported within the last `alive_seconds`.

        The count includes the engine's own owner. An engine without an owner reports nothing. Memory only knows its
        own process.
        """


class BlobCache(Protocol):
    """A bounded cache of byte strings. Any entry may be evicted at any time. A value is never altered."""

    async def get(self, key: str) -> bytes | None:
        """The value, or None if the key is missing, expired or evicted."""

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None:
        """Store or replace a value. One that is larger than the cache is not stored."""


class Document(msgspec.Struct, frozen=True):
    """A stored document. The head is read often, and in groups. The body is read seldom, and alone."""

    head: bytes
    body: bytes


class DocumentStore(Protocol):
    """Documents that tenants store for a time, by name.

    Unlike a blob, a document is kept until it expires or is deleted, with two exceptions. If a tenant's documents
    exceed its bytes, its oldest are deleted. If all documents exceed the engine's bytes, the oldest of the tenant with
    the most bytes are deleted. (Redis is bounded by its own memory.)
    """

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        """Store or replace a document. False if it alone exceeds `max_bytes`, the bound of the tenant's documents."""

    async def get_document(self, tenant: str, name: str) -> Document | None:
        """None if the document does not exist or has expired."""

    async def get_heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """The heads in the order of `names`, read by one operation. None for a document that does not exist."""

    async def delete_document(self, tenant: str, name: str) -> bool:
        """False if the document does not exist."""

    async def delete_some_documents(self, tenant: str) -> int:
        """Delete up to `DELETE_BATCH_SIZE` of a tenant's documents. Returns how many; fewer means none are left."""


class KeyRecord(msgspec.Struct, frozen=True):
    """An API key as it is stored: never the secret. A hash is `hmac-sha256:<hex>` (see `gateway.core.api_keys`)."""

    id: str
    tenant: str
    hash: str
    created: str  # RFC 3339, as all times here
    expires: str | None = None
    revoked: bool = False
    models: tuple[str, ...] | None = None  # None: all models
    classes: tuple[str, ...] | None = None  # None: all latency classes
    limits: dict[str, Any] | None = None  # in the policy's form, as JSON types
    old_hash: str | None = None  # of the secret before the last rotation ...
    old_expires: str | None = None  # ... which is valid until then
    revision: int = 0  # counts the changes


class KeyStore(Protocol):
    """API keys that are managed at run time. They never expire from the store."""

    async def put_key(self, record: KeyRecord) -> None:
        """Add a key, or replace the one with the same id."""

    async def change_key(self, record: KeyRecord) -> bool:
        """Compare and set: replace the previous revision, or add the key if `record` is revision 0.

        False if the stored revision is not the previous one, or a new key's id is taken.
        """

    async def get_key(self, key_id: str) -> KeyRecord | None:
        """None if there is no such key."""

    async def list_keys(self) -> list[KeyRecord]:
        """All keys, including revoked ones, ordered by id."""


class PeerMessages(Protocol):
    """Messages between the gateways on one store, at best effort. No request's outcome may depend on them."""

    is_shared: ClassVar[bool]  # whether other processes can use the same store

    async def publish_and_read(self, message: bytes, after: str) -> tuple[list[bytes], str]:
        """Publish a message, unless it is empty, and read those published after the position `after`.

        `""` is the position before the oldest message kept. Returns at most `PEER_MESSAGES_PER_READ` messages, oldest
        first, and the position to read from next. They include the engine's own. Only the last `PEER_MESSAGES_KEPT`
        are kept. Memory has no peers and returns no messages.
        """


class Storage(ReservationStore, BlobCache, DocumentStore, KeyStore, PeerMessages, Protocol):
    """One engine, constructed as `engine(url, owner=...)`. `open` before use, `close` after; both are idempotent.

    `owner` is this process's name for `expire_leases` and `count_replicas`. It is the same after a restart, and no two
    live processes share one.
    """

    async def open(self) -> None:
        """Connect, and end the leases that a killed process of the same owner has left."""

    async def close(self) -> None:
        """Finish what is in flight and disconnect. Leases stay as they are."""


def check_charges(reservation_id: str, charges: Sequence[Charge]) -> None:
    """Check what every engine relies on: one tenant, no key twice, amounts in range. Raises `ValueError`."""
    _check_keys(tenant_of(reservation_id), tuple([charge.key for charge in charges]))
    amounts = [charge.amount for charge in charges]
    if amounts and not (min(amounts) >= 0 and max(amounts) <= MAX_AMOUNT):
        raise ValueError(f"an amount is outside 0..2**63-1: {', '.join(map(repr, charges))}")


@lru_cache(maxsize=10_000)  # each tenant's calls have the same keys
def _check_keys(tenant: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        if tenant_of(key) != tenant:
            raise ValueError(f"the charge {key!r} belongs to another tenant than its reservation ({tenant!r})")
    if len(set(keys)) != len(keys):
        raise ValueError(f"a key occurs twice in the charges: {', '.join(keys)}")


def check_actual(reservation_id: str, actual: Sequence[int], *, charges: int | None = None) -> None:
    """Check the amounts that a reservation is settled with, and their number if `charges` is given.

    Raises `ValueError`.
    """
    if charges is not None and len(actual) != charges:
        raise ValueError(f"{reservation_id} has {charges} charges, but is settled with {len(actual)} amounts")
    if actual and not (min(actual) >= 0 and max(actual) <= MAX_AMOUNT):
        raise ValueError(f"{reservation_id} is settled with an amount outside 0..2**63-1: {actual}")


def tenant_of(key: str) -> str:
    """The tenant that a reservation's id or a charge's key begins with."""
    return key.partition("/")[0]
