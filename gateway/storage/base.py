"""Interfaces of the shared storage: reservations (leases), cached blobs, documents, API keys, records, peer messages.

A storage engine is one class that must implement all of these interfaces. The contract tests run over every engine.
Each method must be one atomic operation for all processes on the same store, except that `expire_leases` is one
operation per tenant. An engine is used by only one event loop.

* Amounts are integers: requests, tokens, slots, or billionths of a currency unit. Times are seconds since the epoch.
* An operation raises `StorageUnavailable` after at most `OPERATION_TIMEOUT_SECONDS` if the store does not answer.
  Whether the operation took effect is then unknown.
* A reservation has a lease. If its gateway dies, the lease expires, or `expire_leases` ends the lease when a gateway
  with the same owner name starts.
* Gateways lease *slices* of limits, from which they admit calls without an operation per call. One operation renews all
  slices that a gateway has of a tenant's limits, and reports what was used. Slices have leases like reservations.
* A reservation's id and the keys of its charges begin with the same tenant, `tenant/...`. A cluster stores all keys of
  a tenant on one node, so one atomic operation can change all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, final

import msgspec

OPERATION_TIMEOUT_SECONDS = 0.25
HELD_RETRY_SECONDS = 1.0  # retry-after if other calls hold the missing amount, because the end of a call is unknown
REMEMBER_SECONDS = 3600.0  # how long a reservation can still be settled after its lease has ended
# A lease with more time left than this was made before the clock was set back, and is treated as expired.
LEASE_SECONDS_MAX = 3600.0
SLICE_MEMORY_SECONDS = 62 * 86_400.0  # how long after the last report the store remembers which receipts are settled
SLICE_SHARE = 2  # all unused slices of a limit together are about 1/SLICE_SHARE of what is left of it
CLOCK_STEP_SECONDS = 5.0  # callers' times may be out of order by less; a larger step means the clock was set back
MAX_AMOUNT = 2**63 - 1
DEFAULT_BLOB_BYTES = 128 * 2**20
DEFAULT_DOCUMENT_BYTES = 128 * 2**20  # default limit of all documents in memory
DISK_DOCUMENT_BYTES = 8 * 2**30
DELETE_BATCH_SIZE = 100  # documents per operation; small, because other operations wait meanwhile
PEER_MESSAGES_KEPT = 1000  # approximately: an engine may keep a hundred more
PEER_MESSAGES_PER_READ = 64
RECORDS_PER_READ = 1000


@final
class RateCharge(msgspec.Struct, frozen=True, tag=True):
    """Charges `amount` to a rate limit of `limit` per `period_seconds`, with bursts of at most `limit`.

    The limit refills steadily, by the generic cell rate algorithm (see `leaky_bucket`). Settling returns the unused
    part of `amount` that has not refilled meanwhile. If more was used than reserved, settling takes the difference. The
    limit can then be in debt, and later calls wait until it has refilled. An amount above `limit` is always rejected.
    """

    key: str
    amount: int
    limit: int
    period_seconds: float


@final
class SlotCharge(msgspec.Struct, frozen=True, tag="LeaseCharge"):
    """Takes one of `limit` concurrency slots until `release_slots`, `settle` or the end of the lease.

    SQLite files store this charge under the name in `tag`.
    """

    amount: ClassVar[int] = 1

    key: str
    limit: int


@final
class SpendCharge(msgspec.Struct, frozen=True, tag=True):
    """Reserves `amount` of a budget of `limit`.

    The charge fits if the sum of `amount`, the spent amount and the amounts that open reservations hold does not exceed
    `limit`. A budget never refills. Settling replaces the reserved amount by the spent amount, which may exceed the
    limit. The key names the calendar period, so a new period begins a new account. An account is deleted `keep_seconds`
    after its last change (`math.inf`: never). Sums are exact below 2**63.
    """

    key: str
    amount: int
    limit: int
    keep_seconds: float


Charge = RateCharge | SlotCharge | SpendCharge


@final
class Grant(msgspec.Struct, frozen=True):
    """Result of a reservation that was granted. `remaining[i]` is the amount left of the limit of charge i.

    If `leased` is true, the charges were taken from the gateway's slices, and the store has no such reservation.
    """

    remaining: tuple[int, ...]
    leased: bool = False


@final
class Rejection(msgspec.Struct, frozen=True):
    """Result of a reservation that was rejected. `index` is the first charge that exceeds its limit.

    `remaining` is the amount left of that limit. `retry_after_seconds` is the time until a rate has refilled enough, or
    `HELD_RETRY_SECONDS` if other reservations hold the missing amount. It is None if waiting does not help, because the
    budget is spent or the amount is above the limit.
    """

    index: int
    remaining: int
    retry_after_seconds: float | None


@final
class SliceUse(msgspec.Struct, frozen=True):
    """The slice of one limit in a report. The amount of `charge` is ignored."""

    charge: Charge
    unused: int = 0  # the part that is available to further calls
    reserved: int = (
        0  # the part that calls in flight have reserved; 0 for rates, which are used when calls are admitted
    )
    used: int = 0  # spent money, or the used amount of a rate, since the last report; 0 for slots
    refunds: tuple[tuple[float, int], ...] = ()  # unused parts of rates reported earlier, with their `used_at`
    needed: int = 0  # what the slice lacks for calls that wait
    wanted: int = 0  # the most by which the slice may grow, including `needed`


@final
class SliceReport(msgspec.Struct, frozen=True):
    """What a gateway did with the slices of one tenant's limits, and which slices it wants.

    `uses` has all slices that the gateway has of the tenant. A slice that is missing ends. Reports of one process are
    numbered from 1. A report that is sent again has the same number.
    """

    process: str  # unique among all processes, also those of one owner
    number: int
    uses: tuple[SliceUse, ...]
    receipt: (
        str | None
    )  # the event id of the last receipt whose cost is in this report or an earlier one; None: as before
    replicas: int  # the number of gateways that share the limits


@final
class SliceGrant(msgspec.Struct, frozen=True):
    """Result of a report. Each tuple has one value per slice of the report."""

    granted: tuple[int, ...]  # by how much each slice has grown
    remaining: tuple[int, ...]  # what is left of each limit outside of all slices and reservations
    used_at: tuple[float, ...]  # for rates: the time to which `used` was charged, for later refunds; else 0


class ReservationStore(Protocol):
    """Reserves amounts of rate limits, concurrency slots and budgets for calls.

    A reservation takes all of its charges in one atomic step. It has a lease, so the reserved amounts of a dead gateway
    become free. The steps are `reserve`, `extend_lease` while the call runs, `release_slots` when the call has ended,
    and `settle` when the actual usage is known. A lease that is not extended expires.
    """

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        """Take all charges, or none of them.

        If the reservation is neither settled nor extended within `lease_seconds`, its slots and its reserved budget
        become free. Rates refill in any case. Raises `ValueError` if the id is already reserved, or if a key occurs
        twice in the charges.
        """

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        """Take all charges, even beyond their limits. Used for calls that were admitted while the store was down.

        Does nothing if the reservation already exists.
        """

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        """Return the amount left of each charge's limit, without reserving anything.

        Ignores the charges' amounts. All charges must be of the same tenant. The unused part of slices counts as left.
        """

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        """Let the lease end `lease_seconds` from now. Returns False if it has ended or the reservation was settled."""

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        """Free the slots of a call that has ended but is not billed yet. The other charges stay reserved.

        Returns True if this operation freed slots, and False if they were already free.
        """

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        """Replace each reserved amount by the actual amount, and end the reservation. Amounts of slots are ignored.

        Idempotent: returns True for the operation that ended the reservation, and False for every later one. After
        the lease has ended, usage is still counted for `REMEMBER_SECONDS`.
        """

    async def expire_leases(self, owner: str, *, now: float) -> int:
        """End all leases of a dead gateway, which frees its reserved amounts at once. Returns the number of leases.

        The slices of one tenant count as one lease.

        `open` calls this for the engine's own owner, whose previous process may have been killed. If that process is
        still alive and settles a reservation later, the usage is counted, as for any lease that has ended.
        """

    async def report_slices(
        self, tenant: str, owner: str, report: SliceReport, *, lease_seconds: float, now: float
    ) -> SliceGrant:
        """Report what a gateway used of its slices of a tenant's limits, and renew and enlarge the slices.

        A slice and the sum of all other slices, reservations and uses of a limit never exceed the limit. The slices
        last `lease_seconds`. If they are not renewed, slots and money become free, and the slice of a rate counts as
        used, because the gateway may have used it. Usage that is reported afterwards is still counted.

        A report with the number of the last one has no effect and returns the same result. So a report whose answer was
        lost can be sent again. A new `process` of the same owner takes over its slices.
        """

    async def settled_receipt(self, tenant: str, owner: str) -> str | None:
        """Return the last receipt of an owner's reports. None if it has leased no slices of the tenant's limits."""

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        """Report the engine's owner as alive, and count the owners that reported within the last `alive_seconds`.

        The count includes the engine's own owner. An engine without an owner reports nothing. The memory engine counts
        only its own process.
        """


class BlobCache(Protocol):
    """A bounded cache of byte strings. Any entry may be evicted at any time. A value is never altered."""

    async def get(self, key: str) -> bytes | None:
        """Return the value, or None if the key is missing, expired or evicted."""

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None:
        """Store or replace a value. A value that is larger than the cache is not stored."""


class Document(msgspec.Struct, frozen=True):
    """A stored document. Heads are read often and several at a time. Bodies are read rarely and one at a time."""

    head: bytes
    body: bytes


class DocumentStore(Protocol):
    """Stores the documents of tenants under names, for a limited time.

    Unlike a blob, a document is kept until it expires or is deleted, with two exceptions. If a tenant's documents
    exceed the tenant's limit in bytes, its oldest are deleted. If all documents exceed the engine's limit in bytes, the
    oldest documents of the tenant with the most bytes are deleted. Redis has only the limit of its own memory.

    A document whose name has a slash is in a folder, named by the part before the first slash. The documents of a
    folder can be listed, in the order of the bytes of their names.
    """

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        """Store or replace a document. `max_bytes` is the limit of the tenant's documents.

        Returns False if the document alone exceeds the limit.
        """

    async def get_document(self, tenant: str, name: str) -> Document | None:
        """Return a document, or None if it does not exist or has expired."""

    async def get_heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """Return the heads of documents in the order of `names`, with None for a document that does not exist."""

    async def delete_document(self, tenant: str, name: str) -> bool:
        """Delete a document. Returns False if it does not exist."""

    async def list_documents(
        self, tenant: str, folder: str, *, after: str | None = None, limit: int, newest_first: bool = False
    ) -> list[str]:
        """Return the names of up to `limit` documents of a folder, in ascending or descending order.

        The list begins behind the name `after`, which need not exist.
        """

    async def keep_folder(self, tenant: str, folder: str, *, ttl_seconds: float) -> None:
        """Let the documents of a folder, and the document with the folder's name, expire `ttl_seconds` from now.

        A document that expires later is not changed.
        """

    async def delete_some_documents(self, tenant: str) -> int:
        """Delete up to `DELETE_BATCH_SIZE` of a tenant's documents. Returns the number of deleted documents.

        No document is left if the number is less than `DELETE_BATCH_SIZE`.
        """


class KeyRecord(msgspec.Struct, frozen=True):
    """A stored API key: never the secret, but a hash of it.

    A hash is `hmac-sha256:<hex>` (see `gateway.core.api_keys`).
    """

    id: str
    tenant: str
    hash: str
    created: str  # RFC 3339, like all times in this record
    expires: str | None = None
    revoked: bool = False
    models: tuple[str, ...] | None = None  # None: all models
    classes: tuple[str, ...] | None = None  # None: all latency classes
    limits: dict[str, Any] | None = None  # the limits in the policy's format, as JSON types
    old_hash: str | None = None  # hash of the secret before the last rotation
    old_expires: str | None = None  # time until which the secret before the last rotation is valid
    revision: int = 0  # number of changes to this record
    rotated: str | None = None  # time of the last rotation

    @property
    def secret_created(self) -> str:
        """When the current secret was made."""
        return self.rotated or self.created


class KeyStore(Protocol):
    """Stores the API keys that are managed at run time. The store never deletes a key."""

    async def put_key(self, record: KeyRecord) -> None:
        """Add a key, or replace the key with the same id."""

    async def change_key(self, record: KeyRecord) -> bool:
        """Replace the previous revision of a key, or add the key if `record` is revision 0 (compare and set).

        Returns False if the stored revision is not the previous one, or if a new key's id is already used.
        """

    async def get_key(self, key_id: str) -> KeyRecord | None:
        """Return a key, or None if it does not exist."""

    async def list_keys(self) -> list[KeyRecord]:
        """Return all keys, including revoked keys, ordered by id."""


class StoredRecord(msgspec.Struct, frozen=True):
    """A record that administrators change: a tenant, or an admin key. `value` is JSON, or None if it was deleted."""

    kind: str
    name: str
    value: str | None
    revision: int = 0  # number of changes to this record


class RecordChanges(NamedTuple):
    """Records that have changed, the earliest change first, and the position for the next read.

    A position is the store's random id, a colon and a number. A store whose data were lost has another id. There are
    more changes if there are `RECORDS_PER_READ` records. If `restarted`, the read began at the first record,
    because the position was empty, or that of a store whose data were lost: what was read before is void.
    """

    records: list[StoredRecord]
    position: str
    restarted: bool


class RecordStore(Protocol):
    """Stores the records that administrators change, and lists what has changed since a position."""

    async def change_record(self, record: StoredRecord) -> bool:
        """Replace the previous revision of a record, or add it if `record` is revision 0 (compare and set).

        A deletion is a revision without a value, and the next revision may have one again. Returns False if the stored
        revision is not the previous one.
        """

    async def records_since(self, position: str) -> RecordChanges:
        """Return the records that have changed since a position, with their present values. `""` is the beginning."""


class PeerMessages(Protocol):
    """Messages between the gateways on one store. Delivery is best effort, so no request's result may depend on it."""

    is_shared: ClassVar[bool]  # whether other processes can use the same store

    async def publish_and_read(self, message: bytes, after: str) -> tuple[list[bytes], str]:
        """Publish a message, unless it is empty, and read the messages published after the position `after`.

        The position `""` is before the oldest stored message. Returns at most `PEER_MESSAGES_PER_READ` messages, oldest
        first, and the position for the next read. The messages include those that this engine published. Only the last
        `PEER_MESSAGES_KEPT` messages are stored. The memory engine has no peers and returns no messages.
        """


class Storage(ReservationStore, BlobCache, DocumentStore, KeyStore, RecordStore, PeerMessages, Protocol):
    """A storage engine, constructed as `engine(url, owner=...)`. Call `open` before and `close` after use.

    `open` and `close` are idempotent. `owner` is this process's name for `expire_leases` and `count_replicas`. The name
    is the same after a restart, and no two live processes have the same name.
    """

    async def open(self) -> None:
        """Connect, and end the leases that a killed process with the same owner name has left."""

    async def close(self) -> None:
        """Finish the operations in flight, and disconnect. Leases do not change."""


def folder_of(name: str) -> str | None:
    """Return the folder in which the document with this name is. None: in none."""
    folder, slash, _ = name.partition("/")
    return folder if slash else None


def tenant_of(key: str) -> str:
    """Return the tenant with which a reservation's id or a charge's key begins."""
    return key.partition("/")[0]
