"""Batch API storage in a Redis that several gateways share. Any of these gateways can take over any batch.

Each write is one transaction on the keys that it read (WATCH, MULTI), so a killed gateway never leaves half a write.
File contents are also stored in Redis. Redis therefore needs memory for the files, `appendonly yes` to keep them over
a restart, and a `maxmemory-policy` that evicts only keys with an expiry. All keys have the same hash tag, so a Redis
Cluster stores them on one node.

Files and batches are msgpack records under `file:` and `batch:` keys. Sorted sets with equal scores list their ids.
Redis orders equal scores by name, and ids sort by age (see `records.new_id`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from redis.exceptions import RedisError, WatchError

from gateway.batches.records import Batch, File, LineResult
from gateway.batches.stores.base import UNFINISHED_SECONDS, Change
from gateway.core.errors import StorageUnavailable
from gateway.core.timers import time_bound
from gateway.storage.redis_clients import redis_client

OPERATION_TIMEOUT_SECONDS = 5.0
CONFLICTS_MAX = 50  # attempts at a transaction whose watched keys another client changed
FILES_PER_READ = 500

_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(Batch).decode
_file = msgspec.msgpack.Decoder(File).decode


def _key(*parts: str) -> str:
    return ":".join(("wp:{batches}", *parts))


def _tenant_key(kind: str, tenant: str) -> str:
    return _key(kind, quote(tenant, safe=""))


OPEN_KEY, ENDED_KEY, EXPIRING_KEY = _key("open"), _key("ended"), _key("expiring")


class RedisBatchStore:
    """`BatchStore` in the Redis of a URL (see `redis_clients`)."""

    def __init__(self, url: str) -> None:
        # The type is Any, because the client's type hints say str, but without decoding the client returns bytes.
        self._client: Any = redis_client(url)

    async def open(self) -> None:
        async with _bounded():
            await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        async with _bounded(), self._client.pipeline(transaction=True) as pipe:
            yield pipe

    # Contents

    async def append(self, content: str, chunk: bytes) -> None:
        async with self._transaction() as pipe:
            pipe.append(_key("content", content), chunk)
            # The expiry deletes the content if the upload is killed. `_add_file` removes the expiry.
            pipe.expire(_key("content", content), int(UNFINISHED_SECONDS))
            await pipe.execute()

    async def read(self, content: str, offset: int, length: int) -> bytes:
        async with _bounded():
            part: bytes = await self._client.getrange(_key("content", content), offset, offset + length - 1)
        return part

    async def delete_content(self, content: str) -> None:
        async with _bounded():
            await self._client.delete(_key("content", content))

    # Files

    async def add_file(self, file: File, *, max_stored_bytes: int) -> bool:
        stored = _tenant_key("stored", file.tenant)
        async with self._transaction() as pipe:
            for _ in range(CONFLICTS_MAX):
                await pipe.watch(stored)
                if int(await pipe.get(stored) or 0) + file.bytes > max_stored_bytes:
                    return False
                pipe.multi()
                _add_file(file, pipe)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return True
        raise _too_many_conflicts()

    async def file(self, file_id: str) -> File | None:
        async with _bounded():
            record = await self._client.get(_key("file", file_id))
        return None if record is None else _file(record)

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[File]:
        found: list[File] = []
        while len(found) < limit:
            ids = await self._ids(_tenant_key("files", tenant), after, FILES_PER_READ, newest_first=newest_first)
            if not ids:
                break
            records = await self._records("file", ids)
            found += [file for file in map(_file, records) if purpose in (None, file.purpose)]
            after = ids[-1]
        return found[:limit]

    async def delete_file(self, file: File) -> bool:
        key = _key("file", file.id)
        async with self._transaction() as pipe:
            for _ in range(CONFLICTS_MAX):
                await pipe.watch(key)
                if await pipe.get(key) is None:
                    return False
                pipe.multi()
                pipe.delete(key, _key("content", file.id))
                pipe.zrem(_tenant_key("files", file.tenant), file.id)
                pipe.zrem(EXPIRING_KEY, file.id)
                pipe.decrby(_tenant_key("stored", file.tenant), file.bytes)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return True
        raise _too_many_conflicts()

    async def expired_files(self, now: float, limit: int) -> list[File]:
        async with _bounded():
            ids = await self._client.zrangebyscore(EXPIRING_KEY, "-inf", now, start=0, num=limit)
        return [_file(record) for record in await self._records("file", [str(each, "utf-8") for each in ids])]

    # Batches

    async def add_batch(self, batch: Batch, *, max_open: int) -> bool:
        counted = _tenant_key("opened", batch.tenant)
        async with self._transaction() as pipe:
            for _ in range(CONFLICTS_MAX):
                await pipe.watch(counted)
                if int(await pipe.scard(counted)) >= max_open:
                    return False
                pipe.multi()
                pipe.set(_key("batch", batch.id), _encode(batch))
                pipe.zadd(_tenant_key("batches", batch.tenant), {batch.id: 0})
                pipe.zadd(OPEN_KEY, {batch.id: 0})
                pipe.sadd(counted, batch.id)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return True
        raise _too_many_conflicts()

    async def batch(self, batch_id: str) -> Batch | None:
        async with _bounded():
            record = await self._client.get(_key("batch", batch_id))
        return None if record is None else _batch(record)

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch]:
        ids = await self._ids(_tenant_key("batches", tenant), after, limit, newest_first=True)
        return [_batch(record) for record in await self._records("batch", ids)]

    async def open_batches(self) -> list[Batch]:
        ids = await self._ids(OPEN_KEY, None, -1, newest_first=False)
        return [_batch(record) for record in await self._records("batch", ids)]

    async def latest_batches(self, limit: int) -> list[Batch]:
        ids = [
            batch_id
            for key in (OPEN_KEY, ENDED_KEY)
            for batch_id in await self._ids(key, None, limit, newest_first=True)
        ]
        latest = sorted(set(ids), reverse=True)[:limit]
        return [_batch(record) for record in await self._records("batch", latest)]

    async def ended_before(self, batch_id: str, limit: int) -> list[Batch]:
        async with _bounded():
            ids = await self._client.zrangebylex(ENDED_KEY, "-", f"({batch_id}", start=0, num=limit)
        return [_batch(record) for record in await self._records("batch", [str(each, "utf-8") for each in ids])]

    async def update(
        self,
        batch_id: str,
        change: Change,
        *,
        results: Sequence[LineResult] = (),
        recorded: Sequence[int] = (),
        files: Sequence[File] = (),
    ) -> Batch | None:
        key = _key("batch", batch_id)
        async with self._transaction() as pipe:
            for _ in range(CONFLICTS_MAX):
                await pipe.watch(key)
                record = await pipe.get(key)
                after = None if record is None else change(_batch(record))
                if after is None:
                    return None
                pipe.multi()
                _write(after, results, recorded, files, pipe)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return after
        raise _too_many_conflicts()

    async def delete_batch(self, batch: Batch) -> None:
        async with self._transaction() as pipe:
            pipe.delete(_key("batch", batch.id))
            pipe.zrem(_tenant_key("batches", batch.tenant), batch.id)
            pipe.zrem(ENDED_KEY, batch.id)
            await pipe.execute()

    async def finished_lines(self, batch_id: str) -> list[int]:
        async with _bounded():
            return [int(line) for line in await self._client.zrange(_key("lines", batch_id), 0, -1)]

    async def unrecorded_receipts(self, batch_id: str) -> dict[int, bytes]:
        async with _bounded():
            owed = await self._client.hgetall(_key("owed", batch_id))
        return {int(line): receipt for line, receipt in owed.items()}

    async def results(self, batch_id: str, *, after_line: int, limit: int) -> list[LineResult]:
        async with _bounded():
            lines = await self._client.zrangebyscore(
                _key("lines", batch_id), f"({after_line}", "+inf", start=0, num=limit
            )
            contents = await self._client.hmget(_key("results", batch_id), lines) if lines else []
        pairs = zip(lines, contents, strict=True)
        return [LineResult(int(line), content[:1] == b"1", content[1:]) for line, content in pairs if content]

    async def _ids(self, key: str, after: str | None, limit: int, *, newest_first: bool) -> list[str]:
        """Return the ids after `after` in the sorted set `key`, in name order. A limit of -1 means no limit."""
        async with _bounded():
            if newest_first:
                start = f"({after}" if after else "+"
                ids = await self._client.zrevrangebylex(key, start, "-", start=0, num=limit)
            else:
                start = f"({after}" if after else "-"
                ids = await self._client.zrangebylex(key, start, "+", start=0, num=limit)
        return [str(each, "utf-8") for each in ids]

    async def _records(self, kind: str, ids: Sequence[str]) -> list[bytes]:
        """Return the encoded records of `ids`, without those that have been deleted."""
        if not ids:
            return []
        async with _bounded():
            records = await self._client.mget([_key(kind, each) for each in ids])
        return [record for record in records if record is not None]


def _add_file(file: File, pipe: Any) -> None:
    pipe.set(_key("file", file.id), _encode(file))
    pipe.persist(_key("content", file.id))
    pipe.zadd(_tenant_key("files", file.tenant), {file.id: 0})
    pipe.zadd(EXPIRING_KEY, {file.id: file.expires_at})
    pipe.incrby(_tenant_key("stored", file.tenant), file.bytes)


def _write(
    batch: Batch, results: Sequence[LineResult], recorded: Sequence[int], files: Sequence[File], pipe: Any
) -> None:
    pipe.set(_key("batch", batch.id), _encode(batch))
    for file in files:
        _add_file(file, pipe)
    if batch.has_ended:
        pipe.delete(_key("lines", batch.id), _key("results", batch.id), _key("owed", batch.id))
        pipe.zrem(OPEN_KEY, batch.id)
        pipe.srem(_tenant_key("opened", batch.tenant), batch.id)
        pipe.zadd(ENDED_KEY, {batch.id: 0})
        return
    if results:
        pipe.zadd(_key("lines", batch.id), {str(each.line): each.line for each in results})
        contents = {str(each.line): (b"1" if each.ok else b"0") + each.content for each in results}
        pipe.hset(_key("results", batch.id), mapping=contents)
    if owed := {str(each.line): each.receipt for each in results if each.receipt}:
        pipe.hset(_key("owed", batch.id), mapping=owed)
    if recorded:
        pipe.hdel(_key("owed", batch.id), *map(str, recorded))


@contextlib.asynccontextmanager
async def _bounded() -> AsyncIterator[None]:
    """Limit the duration of an operation, and map its failures to `StorageUnavailable`."""
    try:
        async with time_bound(OPERATION_TIMEOUT_SECONDS):
            yield
    except TimeoutError as error:
        raise StorageUnavailable(f"Redis did not answer within {OPERATION_TIMEOUT_SECONDS:g} s") from error
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis cannot be used for batches: {type(error).__name__}") from error


def _too_many_conflicts() -> StorageUnavailable:
    return StorageUnavailable(f"Redis: other clients changed the same keys during {CONFLICTS_MAX} attempts in a row")
