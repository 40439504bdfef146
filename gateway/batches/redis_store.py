"""What the Batch API keeps, in the Redis that several gateways share: any of them takes any batch over.

Each step is a transaction on the keys that it read (WATCH, MULTI), so that it is all there or not, whoever is killed.
The contents of files are here, too: Redis needs the memory for them, `appendonly yes` to keep them over its own
restart, and a `maxmemory-policy` that evicts nothing but what expires. All keys share a hash tag, and so a node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from gateway.batches.records import Batch, File, Result
from gateway.batches.store import UNFINISHED_SECONDS, Change
from gateway.core.errors import StorageUnavailable

OPERATION_TIMEOUT_SECONDS = 5.0
RACES_MAX = 50  # transactions that others came before, until this one is given up
FILES_PER_READ = 500

_encode = msgspec.msgpack.Encoder().encode
_batch = msgspec.msgpack.Decoder(Batch).decode
_file = msgspec.msgpack.Decoder(File).decode


def _key(*parts: str) -> str:
    return ":".join(("wp:{batches}", *parts))


def _of(kind: str, tenant: str) -> str:
    return _key(kind, quote(tenant, safe=""))


OPEN, ENDED, EXPIRING = _key("open"), _key("ended"), _key("expiring")


class RedisStore:
    """`redis://`, `rediss://` or `unix://`, as the storage has it."""

    def __init__(self, url: str) -> None:
        self._client: Any = Redis.from_url(url, protocol=2)  # its types say str where the wire gives bytes

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
            pipe.expire(_key("content", content), int(UNFINISHED_SECONDS))
            await pipe.execute()

    async def read(self, content: str, offset: int, length: int) -> bytes:
        async with _bounded():
            part: bytes = await self._client.getrange(_key("content", content), offset, offset + length - 1)
        return part

    async def drop(self, content: str) -> None:
        async with _bounded():
            await self._client.delete(_key("content", content))

    # Files

    async def add_file(self, file: File, *, max_stored_bytes: int) -> bool:
        stored = _of("stored", file.tenant)
        async with self._transaction() as pipe:
            for _ in range(RACES_MAX):
                await pipe.watch(stored)
                if int(await pipe.get(stored) or 0) + file.bytes > max_stored_bytes:
                    return False
                pipe.multi()
                _add_file(file, pipe)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return True
        raise _raced()

    async def file(self, file_id: str) -> File | None:
        async with _bounded():
            record = await self._client.get(_key("file", file_id))
        return None if record is None else _file(record)

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[File]:
        found: list[File] = []
        while len(found) < limit:
            ids = await self._ids(_of("files", tenant), after, FILES_PER_READ, newest_first=newest_first)
            if not ids:
                break
            records = await self._records("file", ids)
            found += [file for file in map(_file, records) if purpose in (None, file.purpose)]
            after = ids[-1]
        return found[:limit]

    async def delete_file(self, file: File) -> bool:
        key = _key("file", file.id)
        async with self._transaction() as pipe:
            for _ in range(RACES_MAX):
                await pipe.watch(key)
                if await pipe.get(key) is None:
                    return False
                pipe.multi()
                pipe.delete(key, _key("content", file.id))
                pipe.zrem(_of("files", file.tenant), file.id)
                pipe.zrem(EXPIRING, file.id)
                pipe.decrby(_of("stored", file.tenant), file.bytes)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return True
        raise _raced()

    async def expired_files(self, now: float, limit: int) -> list[File]:
        async with _bounded():
            ids = await self._client.zrangebyscore(EXPIRING, "-inf", now, start=0, num=limit)
        return [_file(record) for record in await self._records("file", [str(each, "utf-8") for each in ids])]

    # Batches

    async def add_batch(self, batch: Batch, *, max_open: int) -> bool:
        counted = _of("opened", batch.tenant)
        async with self._transaction() as pipe:
            for _ in range(RACES_MAX):
                await pipe.watch(counted)
                if int(await pipe.scard(counted)) >= max_open:
                    return False
                pipe.multi()
                pipe.set(_key("batch", batch.id), _encode(batch))
                pipe.zadd(_of("batches", batch.tenant), {batch.id: 0})
                pipe.zadd(OPEN, {batch.id: 0})
                pipe.sadd(counted, batch.id)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return True
        raise _raced()

    async def batch(self, batch_id: str) -> Batch | None:
        async with _bounded():
            record = await self._client.get(_key("batch", batch_id))
        return None if record is None else _batch(record)

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch]:
        ids = await self._ids(_of("batches", tenant), after, limit, newest_first=True)
        return [_batch(record) for record in await self._records("batch", ids)]

    async def open_batches(self) -> list[Batch]:
        ids = await self._ids(OPEN, None, -1, newest_first=False)
        return [_batch(record) for record in await self._records("batch", ids)]

    async def ended_before(self, batch_id: str, limit: int) -> list[Batch]:
        async with _bounded():
            ids = await self._client.zrangebylex(ENDED, "-", f"({batch_id}", start=0, num=limit)
        return [_batch(record) for record in await self._records("batch", [str(each, "utf-8") for each in ids])]

    async def update(
        self,
        batch_id: str,
        change: Change,
        *,
        results: Sequence[Result] = (),
        paid: Sequence[int] = (),
        files: Sequence[File] = (),
    ) -> Batch | None:
        key = _key("batch", batch_id)
        async with self._transaction() as pipe:
            for _ in range(RACES_MAX):
                await pipe.watch(key)
                record = await pipe.get(key)
                after = None if record is None else change(_batch(record))
                if after is None:
                    return None
                pipe.multi()
                _write(after, results, paid, files, pipe)
                with contextlib.suppress(WatchError):
                    await pipe.execute()
                    return after
        raise _raced()

    async def forget(self, batch: Batch) -> None:
        async with self._transaction() as pipe:
            pipe.delete(_key("batch", batch.id))
            pipe.zrem(_of("batches", batch.tenant), batch.id)
            pipe.zrem(ENDED, batch.id)
            await pipe.execute()

    async def done(self, batch_id: str) -> list[int]:
        async with _bounded():
            return [int(line) for line in await self._client.zrange(_key("lines", batch_id), 0, -1)]

    async def owed(self, batch_id: str) -> dict[int, bytes]:
        async with _bounded():
            owed = await self._client.hgetall(_key("owed", batch_id))
        return {int(line): receipt for line, receipt in owed.items()}

    async def results(self, batch_id: str, *, after_line: int, limit: int) -> list[Result]:
        async with _bounded():
            lines = await self._client.zrangebyscore(
                _key("lines", batch_id), f"({after_line}", "+inf", start=0, num=limit
            )
            contents = await self._client.hmget(_key("results", batch_id), lines) if lines else []
        pairs = zip(lines, contents, strict=True)
        return [Result(int(line), content[:1] == b"1", content[1:]) for line, content in pairs if content]

    async def _ids(self, key: str, after: str | None, limit: int, *, newest_first: bool) -> list[str]:
        """Members behind `after` in the order of their names; a limit of -1 is none."""
        async with _bounded():
            if newest_first:
                start = f"({after}" if after else "+"
                ids = await self._client.zrevrangebylex(key, start, "-", start=0, num=limit)
            else:
                start = f"({after}" if after else "-"
                ids = await self._client.zrangebylex(key, start, "+", start=0, num=limit)
        return [str(each, "utf-8") for each in ids]

    async def _records(self, kind: str, ids: Sequence[str]) -> list[bytes]:
        """Of those that are still there."""
        if not ids:
            return []
        async with _bounded():
            records = await self._client.mget([_key(kind, each) for each in ids])
        return [record for record in records if record is not None]


def _add_file(file: File, pipe: Any) -> None:
    pipe.set(_key("file", file.id), _encode(file))
    pipe.persist(_key("content", file.id))
    pipe.zadd(_of("files", file.tenant), {file.id: 0})
    pipe.zadd(EXPIRING, {file.id: file.expires_at})
    pipe.incrby(_of("stored", file.tenant), file.bytes)


def _write(batch: Batch, results: Sequence[Result], paid: Sequence[int], files: Sequence[File], pipe: Any) -> None:
    pipe.set(_key("batch", batch.id), _encode(batch))
    for file in files:
        _add_file(file, pipe)
    if batch.over:
        pipe.delete(_key("lines", batch.id), _key("results", batch.id), _key("owed", batch.id))
        pipe.zrem(OPEN, batch.id)
        pipe.srem(_of("opened", batch.tenant), batch.id)
        pipe.zadd(ENDED, {batch.id: 0})
        return
    if results:
        pipe.zadd(_key("lines", batch.id), {str(each.line): each.line for each in results})
        contents = {str(each.line): (b"1" if each.ok else b"0") + each.content for each in results}
        pipe.hset(_key("results", batch.id), mapping=contents)
    if owed := {str(each.line): each.receipt for each in results if each.receipt}:
        pipe.hset(_key("owed", batch.id), mapping=owed)
    if paid:
        pipe.hdel(_key("owed", batch.id), *map(str, paid))


@contextlib.asynccontextmanager
async def _bounded() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(OPERATION_TIMEOUT_SECONDS):
            yield
    except TimeoutError as error:
        raise StorageUnavailable(f"Redis did not answer in {OPERATION_TIMEOUT_SECONDS:g} s") from error
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis can not be used for batches: {type(error).__name__}") from error


def _raced() -> StorageUnavailable:
    return StorageUnavailable("Redis: others were faster each time")
