"""The storage engine for gateways on several machines: Redis 7, Valkey, or any server that runs the same Lua scripts.

Each reservation and each settlement is one call of a Lua script (`redis.lua`), so it is atomic for all replicas. The
replicas need no common clock: Redis's time decides, and a caller's `now` is ignored. Calls of one event-loop tick are
sent as one pipeline, which lowers redis-py's CPU cost per call from 80 to 30 microseconds. All keys of a tenant have
one hash tag, so a Redis Cluster stores them on one node, and the script that changes them is atomic there.

Redis must persist its data and evict only what expires. Set `appendonly yes`, so that budgets survive a restart. Set
`maxmemory-policy volatile-ttl` if the response cache is in the same Redis. Documents live longer than everything else,
so Redis evicts the counters of limits before any document. Their bounds must leave it enough memory.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Literal
from urllib.parse import quote

import msgspec
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from gateway.core.errors import StorageUnavailable
from gateway.core.timers import time_bound
from gateway.storage.base import (
    DEFAULT_BLOB_BYTES,
    DEFAULT_DOCUMENT_BYTES,
    DELETE_BATCH_SIZE,
    OPERATION_TIMEOUT_SECONDS,
    PEER_MESSAGES_KEPT,
    PEER_MESSAGES_PER_READ,
    RECORDS_PER_READ,
    Charge,
    Document,
    Grant,
    KeyRecord,
    RecordChanges,
    Rejection,
    SliceGrant,
    SliceReport,
    StoredRecord,
    tenant_of,
)
from gateway.storage.checks import check_actual, check_charges, check_report
from gateway.storage.micro_batcher import MicroBatcher
from gateway.storage.redis_clients import redis_client
from gateway.storage.redis_commands import (
    CHANGE_KEY,
    CHANGE_RECORD,
    DOCUMENTS,
    GET_HEADS,
    KEYS_KEY,
    NOTICES_KEY,
    RECORD_KEYS,
    RECORDS_SINCE,
    REPLICAS,
    SCRIPT,
    SCRIPT_SHA1,
    blob_key,
    charge_arguments,
    document_key,
    milliseconds,
    retry_after_seconds,
    tenant_key,
    tenants_key,
    use_arguments,
)

FIND_NODES_SECONDS = 5.0  # at the start
MAX_PIPELINES = 4  # pipelines in flight, each on a separate connection
MAX_REGISTERED_TENANTS = 10_000  # tenants whose registration a process remembers
REGISTER_TENANT_SECONDS = 3600.0
_Command = tuple[Any, ...]
_decode_key = msgspec.json.Decoder(KeyRecord).decode
_decode_record = msgspec.json.Decoder(StoredRecord).decode


class RedisStorage:
    """Storage engine for the URLs of `redis_clients`.

    `blob_bytes` limits one blob, and `document_bytes` limits one document. Redis's `maxmemory` limits all of them
    together. `clock="caller"` uses each caller's `now` instead of Redis's time, for tests that simulate time.
    """

    is_shared: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        *,
        owner: str = "",
        blob_bytes: int = DEFAULT_BLOB_BYTES,
        document_bytes: int = DEFAULT_DOCUMENT_BYTES,
        timeout_seconds: float = OPERATION_TIMEOUT_SECONDS,
        clock: Literal["server", "caller"] = "server",
    ) -> None:
        self._client = redis_client(
            url,
            max_connections=MAX_PIPELINES,
            # `_run` sets one timeout for the complete pipeline. There are no retries, because the commands may have
            # taken effect.
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
        )
        self._finds_nodes = "+" in url.partition("://")[0]
        self._owner = owner
        self._timeout_seconds = timeout_seconds
        self._blob_bytes = blob_bytes
        self._document_bytes = document_bytes
        self._callers_clock = clock == "caller"
        self._registered_tenants: OrderedDict[str, float] = OrderedDict()  # loop time of registration, oldest first
        self._pipelines: MicroBatcher[_Command] = MicroBatcher(
            self._run, max_in_flight=MAX_PIPELINES, timeout_seconds=timeout_seconds, store="Redis"
        )

    async def open(self) -> None:
        """Load the script, and end the leases that the owner's previous process has left."""
        try:
            if self._finds_nodes:
                await self._find_nodes()
            else:
                await self._pipelines.submit(("SCRIPT LOAD", SCRIPT))
        except StorageUnavailable as error:  # this message has the address, because no client sees it
            raise StorageUnavailable(f"{error.message}: {error.__cause__}") from error
        if self._owner:
            await self.expire_leases(self._owner, now=0.0)

    async def _find_nodes(self) -> None:
        """Load the script into each primary, which takes several round trips, because they must be found first."""
        try:
            async with time_bound(max(FIND_NODES_SECONDS, self._timeout_seconds)):
                await self._client.script_load(SCRIPT)
        except (TimeoutError, RedisError, OSError) as error:
            raise StorageUnavailable("no node of Redis can be found") from error

    async def close(self) -> None:
        """Finish the pipelines in flight, and close the connections."""
        await self._pipelines.drain()
        await self._client.aclose()

    async def _run(self, batch: Sequence[_Command]) -> Sequence[Any]:
        """Execute a batch as one pipeline, within the timeout. A pipeline that times out closes its connection."""
        try:
            async with time_bound(self._timeout_seconds):
                results = await self._pipeline(batch)
                unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
                if unknown:  # Redis restarted or failed over, so EVAL must load the script
                    self._registered_tenants.clear()
                    again = await self._pipeline([("EVAL", SCRIPT, *batch[i][2:]) for i in unknown])
                    for i, result in zip(unknown, again, strict=True):
                        results[i] = result
        except TimeoutError as error:
            raise StorageUnavailable(f"Redis did not answer within {self._timeout_seconds} s") from error
        except (RedisError, OSError) as error:
            if self._finds_nodes:  # another node may have taken the place of this one
                await self._client.aclose()
            raise StorageUnavailable("Redis cannot be reached") from error
        return [
            StorageUnavailable(f"Redis returned an error: {each}") if isinstance(each, RedisError) else each
            for each in results
        ]

    async def _pipeline(self, commands: Sequence[_Command]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            results: list[Any] = await pipeline.execute(raise_on_error=False)
        return results

    async def _script(self, operation: str, subject: str, tenant: str, now: float, *arguments: object) -> Any:
        """Run an operation of `redis.lua`. `subject` is a reservation id, an owner or a tenant."""
        time = repr(now) if self._callers_clock else ""
        command = ("EVALSHA", SCRIPT_SHA1, 1, f"wp:{{{quote(tenant)}}}", operation, subject, time, *arguments)
        return await self._pipelines.submit(command)

    async def reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> Grant | Rejection:
        """Reserve by one script call. Also registers the tenant for `expire_leases` once an hour."""
        check_charges(reservation_id, charges)
        tenant = tenant_of(reservation_id)
        if self._owner:
            await self._register_tenant(tenant)
        arguments = charge_arguments(charges, lease_seconds)
        result = await self._script("reserve", reservation_id, tenant, now, lease_seconds, self._owner, *arguments)
        match result:
            case [b"granted", *remaining]:
                return Grant(tuple(remaining))
            case [b"refused", index, remaining, retry]:
                return Rejection(index, remaining, retry_after_seconds(retry))
            case _:
                raise ValueError(f"reservation {reservation_id} is already open")

    async def force_reserve(
        self, reservation_id: str, charges: Sequence[Charge], *, lease_seconds: float, now: float
    ) -> None:
        check_charges(reservation_id, charges)
        tenant = tenant_of(reservation_id)
        if self._owner:
            await self._register_tenant(tenant)
        arguments = charge_arguments(charges, lease_seconds)
        await self._script("adopt", reservation_id, tenant, now, lease_seconds, self._owner, *arguments)

    async def remaining(self, charges: Sequence[Charge], *, now: float) -> tuple[int, ...]:
        """Read the remaining amounts with one script call. The script also releases what expired leases still held."""
        if not charges:
            return ()
        tenant = tenant_of(charges[0].key)
        arguments = charge_arguments(charges, 0.0)
        return tuple(await self._script("left", tenant, tenant, now, "", "", *arguments))

    async def count_replicas(self, *, alive_seconds: float, now: float) -> int:
        """Report this owner and count the others, in a sorted set of owners by the time of their last report."""
        replicas: int = await self._script("count_replicas", self._owner, REPLICAS, now, alive_seconds)
        return replicas

    async def _register_tenant(self, tenant: str) -> None:
        """Add the tenant to the set of tenants in which this owner has reservations, for `expire_leases`.

        This is done once an hour. The set expires after two hours.
        """
        now = asyncio.get_running_loop().time()
        if now < self._registered_tenants.get(tenant, -math.inf) + REGISTER_TENANT_SECONDS:
            return
        key = tenants_key(self._owner)
        await asyncio.gather(
            self._pipelines.submit(("SADD", key, tenant)),
            self._pipelines.submit(("EXPIRE", key, round(2 * REGISTER_TENANT_SECONDS))),
        )
        self._registered_tenants[tenant] = now
        self._registered_tenants.move_to_end(tenant)
        if len(self._registered_tenants) > MAX_REGISTERED_TENANTS:
            self._registered_tenants.popitem(last=False)

    async def extend_lease(self, reservation_id: str, *, lease_seconds: float, now: float) -> bool:
        tenant = tenant_of(reservation_id)
        return bool(await self._script("extend", reservation_id, tenant, now, lease_seconds))

    async def release_slots(self, reservation_id: str, *, now: float) -> bool:
        return bool(await self._script("leave", reservation_id, tenant_of(reservation_id), now))

    async def settle(self, reservation_id: str, actual: Sequence[int], *, now: float) -> bool:
        """Settle by one script call. Raises `ValueError` if the number of amounts is wrong."""
        check_actual(reservation_id, actual)
        result = await self._script("settle", reservation_id, tenant_of(reservation_id), now, *actual)
        if isinstance(result, list):
            raise ValueError(f"{reservation_id} has {result[1]} charges, but is settled with {len(actual)} amounts")
        return bool(result)

    async def report_slices(
        self, tenant: str, owner: str, report: SliceReport, *, lease_seconds: float, now: float
    ) -> SliceGrant:
        """Apply a report by one script call. Also registers the tenant for `expire_leases` once an hour."""
        check_report(tenant, report)
        if self._owner:
            await self._register_tenant(tenant)
        arguments = use_arguments(report.uses)
        values = await self._script(
            "report", owner, tenant, now, lease_seconds, report.process, report.number, report.receipt or "",
            report.replicas, *arguments,
        )  # fmt: skip
        return SliceGrant(tuple(map(int, values[::3])), tuple(map(int, values[1::3])), tuple(map(float, values[2::3])))

    async def settled_receipt(self, tenant: str, owner: str) -> str | None:
        receipt = await self._script("settled_receipt", owner, tenant, time.time())
        return None if receipt is None else str(receipt, "ascii")

    async def expire_leases(self, owner: str, *, now: float) -> int:
        """End the owner's leases by one script call for each tenant that is registered for the owner."""
        tenants = await self._pipelines.submit(("SMEMBERS", tenants_key(owner)))
        released = await asyncio.gather(
            *(self._script("release_owner", owner, str(tenant, "utf-8"), now) for tenant in tenants)
        )
        return sum(released)

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._pipelines.submit(("GET", blob_key(key)))
        return value

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None:
        """Store a blob of at most `blob_bytes`. Redis evicts blobs by its `maxmemory-policy`."""
        if len(value) <= self._blob_bytes:
            await self._pipelines.submit(("SET", blob_key(key), value, "PX", milliseconds(ttl_seconds)))

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        """Store a document by one script call, which first deletes documents that expire soonest until it fits."""
        if len(name.encode()) + len(document.head) + len(document.body) > min(max_bytes, self._document_bytes):
            await self.delete_document(tenant, name)
            return False
        time = milliseconds(ttl_seconds)
        await self._document("put", tenant, name, document.head, document.body, time, max_bytes)
        return True

    async def _document(self, operation: str, tenant: str, name: str, *arguments: object) -> Any:
        return await self._pipelines.submit(("EVAL", DOCUMENTS, 1, tenant_key(tenant), operation, name, *arguments))

    async def get_document(self, tenant: str, name: str) -> Document | None:
        head, body = await self._pipelines.submit(("HMGET", document_key(tenant, name), "head", "body"))
        return None if head is None else Document(head, body)

    async def get_heads(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """Read all heads by one script call."""
        if not names:
            return []
        keys = [document_key(tenant, name) for name in names]
        heads: list[bytes | None] = await self._pipelines.submit(("EVAL", GET_HEADS, len(keys), *keys))
        return heads

    async def delete_document(self, tenant: str, name: str) -> bool:
        return bool(await self._document("delete", tenant, name))

    async def list_documents(
        self, tenant: str, folder: str, *, after: str | None = None, limit: int, newest_first: bool = False
    ) -> list[str]:
        """List a folder by one script call."""
        order = "descending" if newest_first else "ascending"
        names: list[bytes] = await self._document("list", tenant, folder, after or "", limit, order)
        return [name.decode() for name in names]

    async def keep_folder(self, tenant: str, folder: str, *, ttl_seconds: float) -> None:
        """Change the expiry of a folder's documents by one script call."""
        await self._document("keep", tenant, folder, milliseconds(ttl_seconds))

    async def delete_some_documents(self, tenant: str) -> int:
        """Delete documents that expire soonest, by one script call."""
        return int(await self._document("delete_some", tenant, "", DELETE_BATCH_SIZE))

    async def put_key(self, record: KeyRecord) -> None:
        await self._pipelines.submit(("HSET", KEYS_KEY, record.id, msgspec.json.encode(record)))

    async def change_key(self, record: KeyRecord) -> bool:
        """Compare the stored revision and replace the record, by one script call."""
        packed = msgspec.json.encode(record)
        before = str(record.revision - 1) if record.revision else ""
        return bool(await self._pipelines.submit(("EVAL", CHANGE_KEY, 1, KEYS_KEY, record.id, before, packed)))

    async def get_key(self, key_id: str) -> KeyRecord | None:
        record = await self._pipelines.submit(("HGET", KEYS_KEY, key_id))
        return None if record is None else _decode_key(record)

    async def list_keys(self) -> list[KeyRecord]:
        records = await self._pipelines.submit(("HVALS", KEYS_KEY))
        return sorted((_decode_key(record) for record in records), key=lambda record: record.id)

    async def change_record(self, record: StoredRecord) -> bool:
        """Compare the stored revision, replace the record and number the change, by one script call."""
        before = str(record.revision - 1) if record.revision else ""
        field, packed = f"{record.kind}/{record.name}", msgspec.json.encode(record)
        command = ("EVAL", CHANGE_RECORD, len(RECORD_KEYS), *RECORD_KEYS, field, before, packed, secrets.token_hex(8))
        return bool(await self._pipelines.submit(command))

    async def records_since(self, position: str) -> RecordChanges:
        """Read by one script call. The position is the store's random id and the number of the last change."""
        known, _, after = position.partition(":")
        command = (
            "EVAL", RECORDS_SINCE, len(RECORD_KEYS), *RECORD_KEYS, known, after or "0", RECORDS_PER_READ,
            secrets.token_hex(8),
        )  # fmt: skip
        store, last, records = await self._pipelines.submit(command)
        return RecordChanges(
            [_decode_record(record) for record in records], f"{store.decode()}:{last.decode()}", known != store.decode()
        )

    async def publish_and_read(self, message: bytes, after: str) -> tuple[list[bytes], str]:
        """Publish by XADD and read by XREAD on one stream, in one pipeline. The position is a stream id."""
        read = self._pipelines.submit(("XREAD", "COUNT", PEER_MESSAGES_PER_READ, "STREAMS", NOTICES_KEY, after or "0"))
        if message:
            add = self._pipelines.submit(("XADD", NOTICES_KEY, "MAXLEN", "~", PEER_MESSAGES_KEPT, "*", "n", message))
            _, streams = await asyncio.gather(add, read)
        else:
            streams = await read
        if not streams:
            return [], after
        entries = streams[0][1]
        return [fields[b"n"] for _, fields in entries], str(entries[-1][0], "ascii")
