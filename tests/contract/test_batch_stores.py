"""Contract of `BatchStore`, run over SQLite and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.batches.records import Batch, BatchStatus, File, LineResult, TokenTotals, new_id
from gateway.batches.stores.base import CHUNK_BYTES, BatchStore
from gateway.batches.stores.redis import RedisBatchStore
from gateway.batches.stores.sqlite import SqliteBatchStore
from gateway.core.errors import StorageUnavailable
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]


@pytest.fixture(params=["sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BatchStore]:
    if request.param == "sqlite":
        store: BatchStore = SqliteBatchStore(tmp_path / "batches.db")
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        store = RedisBatchStore(server.url)
    await store.open()
    yield store
    await store.close()


def a_file(number: int = 0, *, tenant: str = "t", size: int = 10, expires_at: int = 2_000, **more: str) -> File:
    return File(
        id=new_id("file-", 1000.0 + number),
        tenant=tenant,
        filename="f.jsonl",
        purpose=more.get("purpose", "batch"),
        bytes=size,
        created_at=1000 + number,
        expires_at=expires_at,
    )


def a_batch(number: int = 0, *, tenant: str = "t") -> Batch:
    return Batch(
        id=new_id("batch_", 1000.0 + number),
        tenant=tenant,
        key_id="k",
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1000 + number,
        expires_at=90_000,
    )


async def test_a_content_can_be_read_at_any_offset(store: BatchStore) -> None:
    parts = [bytes([number]) * CHUNK_BYTES for number in range(3)] + [b"end"]
    for part in parts:
        await store.append("file-a", part)
    whole = b"".join(parts)
    for offset, length in [
        (0, 10),
        (CHUNK_BYTES - 5, 10),
        (CHUNK_BYTES, CHUNK_BYTES),
        (len(whole) - 4, 100),
        (9**9, 5),
    ]:
        assert await store.read("file-a", offset, length) == whole[offset : offset + length]
    await store.delete_content("file-a")
    assert await store.read("file-a", 0, 10) == b""


async def test_files_are_listed_by_tenant_purpose_and_page(store: BatchStore) -> None:
    files = [a_file(number, purpose="batch_output" if number % 2 else "batch") for number in range(5)]
    for file in [*files, a_file(9, tenant="other")]:
        assert await store.add_file(file, max_stored_bytes=1000)
    newest = await store.files("t", purpose=None, after=None, limit=3, newest_first=True)
    assert newest == files[:1:-1]
    assert await store.files("t", purpose=None, after=newest[-1].id, limit=3, newest_first=True) == files[1::-1]
    assert await store.files("t", purpose=None, after=files[3].id, limit=9, newest_first=False) == files[4:]
    assert await store.files("t", purpose="batch_output", after=None, limit=9, newest_first=False) == files[1::2]
    assert await store.file(files[0].id) == files[0]


async def test_a_tenant_stores_at_most_max_stored_bytes_until_it_deletes(store: BatchStore) -> None:
    first, second = a_file(0, size=60), a_file(1, size=60)
    await store.append(first.id, b"x")
    assert await store.add_file(first, max_stored_bytes=100)
    assert not await store.add_file(second, max_stored_bytes=100)
    assert await store.file(second.id) is None
    assert await store.delete_file(first)
    assert not await store.delete_file(first)
    assert await store.read(first.id, 0, 5) == b""
    assert await store.add_file(second, max_stored_bytes=100)


async def test_files_expire(store: BatchStore) -> None:
    early, late = a_file(0, expires_at=1500), a_file(1, expires_at=2500)
    for file in (early, late):
        await store.add_file(file, max_stored_bytes=1000)
    assert await store.expired_files(2000.0, 10) == [early]


async def test_a_tenant_has_at_most_max_open_batches(store: BatchStore) -> None:
    first, second, others = a_batch(0), a_batch(1), a_batch(2, tenant="other")
    assert await store.add_batch(first, max_open=1)
    assert not await store.add_batch(second, max_open=1)
    assert await store.add_batch(others, max_open=1)
    assert await store.open_batches() == [first, others]
    await store.update(first.id, lambda batch: batch.entered(BatchStatus.FAILED, 1.0))
    assert await store.add_batch(second, max_open=1)
    assert [batch.id for batch in await store.batches("t", after=None, limit=9)] == [second.id, first.id]
    assert await store.batches("t", after=first.id, limit=9) == []
    assert [batch.id for batch in await store.ended_before(second.id, 9)] == [first.id]
    newest = [others.id, second.id, first.id]
    assert [batch.id for batch in await store.latest_batches(9)] == newest, "of all tenants, open and ended"
    assert [batch.id for batch in await store.latest_batches(2)] == newest[:2]


async def test_results_are_written_together_with_the_change_or_not_at_all(store: BatchStore) -> None:
    batch = a_batch()
    await store.add_batch(batch, max_open=9)
    results = [LineResult(12, True, b"twelve", b"receipt"), LineResult(3, False, b"three")]

    def counted(before: Batch) -> Batch:
        return msgspec.structs.replace(
            before, completed=before.completed + 1, tokens=before.tokens + TokenTotals(1, 0, 2)
        )

    assert await store.update(batch.id, lambda _: None, results=results) is None
    assert await store.finished_lines(batch.id) == []
    assert await store.update("batch_no", counted, results=results) is None

    after = await store.update(batch.id, counted, results=results)
    assert after == await store.batch(batch.id) == counted(batch)
    assert sorted(await store.finished_lines(batch.id)) == [3, 12]
    assert await store.unrecorded_receipts(batch.id) == {12: b"receipt"}
    assert await store.results(batch.id, after_line=0, limit=1) == [LineResult(3, False, b"three")]
    assert await store.results(batch.id, after_line=3, limit=9) == [LineResult(12, True, b"twelve")]
    await store.update(batch.id, counted, recorded=[12])
    assert await store.unrecorded_receipts(batch.id) == {}


async def test_the_end_of_a_batch_adds_its_files_and_deletes_its_results(store: BatchStore) -> None:
    batch, output = a_batch(), a_file(5, purpose="batch_output")
    await store.add_batch(batch, max_open=9)
    await store.update(batch.id, lambda before: before, results=[LineResult(1, True, b"x", b"r")])
    await store.append(output.id, b"output")
    ended = await store.update(batch.id, lambda each: each.entered(BatchStatus.COMPLETED, 5.0), files=[output])
    assert ended is not None
    assert ended.has_ended
    assert await store.file(output.id) == output
    assert (await store.finished_lines(batch.id), await store.unrecorded_receipts(batch.id)) == ([], {})
    assert await store.open_batches() == []
    await store.delete_batch(ended)
    assert await store.batch(batch.id) is None
    assert await store.read(output.id, 0, 99) == b"output"


async def test_one_of_many_concurrent_claims_gets_the_lease(store: BatchStore) -> None:
    batch = a_batch()
    await store.add_batch(batch, max_open=9)

    async def claim(owner: str) -> Batch | None:
        return await store.update(batch.id, lambda each: each.claimed(owner, 100.0, 15.0))

    winners = [claimed for claimed in await asyncio.gather(*map(claim, "abcdefgh")) if claimed is not None]
    assert len(winners) == 1
    (winner,) = winners
    assert await store.update(batch.id, lambda each: each.extended("other", 101.0, 15.0)) is None
    assert await store.update(batch.id, lambda each: each.claimed("z", 114.9, 15.0)) is None
    assert await store.update(batch.id, lambda each: each.extended(winner.owner, 110.0, 15.0))
    assert await store.update(batch.id, lambda each: each.claimed("z", 115.1, 15.0)) is None
    assert await store.update(batch.id, lambda each: each.claimed(winner.owner, 111.0, 15.0))
    assert await store.update(batch.id, lambda each: each.claimed("z", 126.1, 15.0))


async def test_records_survive_reopening_and_unfinished_uploads_do_not(tmp_path: Path) -> None:
    batch = a_batch()
    first = SqliteBatchStore(tmp_path / "batches.db")
    await first.open()
    await first.add_batch(batch, max_open=9)
    await first.append("file-000000000000orphan", b"left by a killed upload")
    await first.close()
    with pytest.raises(StorageUnavailable):
        await first.batch(batch.id)
    second = SqliteBatchStore(tmp_path / "batches.db")
    await second.open()
    assert await second.batch(batch.id) == batch
    assert await second.read("file-000000000000orphan", 0, 9) == b""
    await second.close()


async def test_an_unreachable_redis_raises_storage_unavailable(redis_server: RedisServer, tmp_path: Path) -> None:
    store = RedisBatchStore(f"unix://{tmp_path / 'missing.sock'}")
    with pytest.raises(StorageUnavailable):
        await store.open()
    await store.close()
