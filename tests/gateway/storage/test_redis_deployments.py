"""A Redis Cluster of several nodes, and a Redis that a Sentinel watches: every store, before and after a failover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.batches.records import BatchStatus
from gateway.batches.stores.redis import RedisBatchStore
from gateway.billing.ledger import Ledger
from gateway.billing.ledger.collector import collect
from gateway.billing.ledger.shipper import Shipper
from gateway.core.errors import StorageUnavailable
from gateway.limits.slices import Slices
from gateway.storage import open_storage
from gateway.storage.base import (
    Charge,
    Document,
    Grant,
    KeyRecord,
    RateCharge,
    Rejection,
    SlotCharge,
    SpendCharge,
    StoredRecord,
)
from gateway.storage.redis import RedisStorage
from gateway.storage.redis_clients import redis_client
from tests.contract.test_batch_stores import a_batch, a_file
from tests.gateway.billing.ledger.receipts import a_receipt
from tests.redis_deployments import SERVICE, Cluster, Watched, started

pytestmark = pytest.mark.slow

TENANTS = [f"t{number}" for number in range(9)]  # on all nodes of the cluster
PATIENT_SECONDS = 20.0
LIMIT = 100


@pytest.fixture(scope="module", params=[Cluster, Watched])
def redises(request: pytest.FixtureRequest) -> Iterator[Cluster | Watched]:
    with started(request.param) as running:
        yield running


@asynccontextmanager
async def opened(url: str, owner: str) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(url, owner=owner, timeout_seconds=PATIENT_SECONDS)
    await storage.open()
    yield storage
    await storage.close()


def charges(tenant: str, amount: int = 1) -> list[Charge]:
    return [
        RateCharge(f"{tenant}/tokens", amount, LIMIT, 1e6),
        SlotCharge(f"{tenant}/concurrency", LIMIT),
        SpendCharge(f"{tenant}/budget/total", amount, LIMIT, 1e9),
    ]


async def call(slices: Slices, name: str, tenant: str, amount: int = 1) -> Grant | Rejection:
    """Admit a call as the limiter does, and settle it."""
    wanted, identity = charges(tenant, amount), f"{tenant}/{name}"
    leased = slices.take(identity, wanted) or await slices.lease(identity, wanted)
    verdict = leased or await slices.reserve(identity, wanted, lease_seconds=30.0, now=time.time())
    if isinstance(verdict, Grant):
        await slices.settle(identity, [amount, 1, amount], now=time.time())
    return verdict


async def test_two_gateways_share_leased_slices_of_each_limit(redises: Cluster | Watched) -> None:
    """Together they admit exactly the limit, and every amount is charged once."""
    async with opened(redises.url, "one") as first, opened(redises.url, "other") as second:
        gateways = [Slices(first, "one"), Slices(second, "other")]
        for slices in gateways:
            await slices.start()  # without it, `stop` reports and returns nothing
            slices.begin_leasing()
        for tenant in TENANTS:
            admitted, number = 0, 0
            while number < 3 * LIMIT and admitted < LIMIT:
                admitted += isinstance(await call(gateways[number % 2], f"c{number}", tenant), Grant)
                number += 1
            assert admitted == LIMIT
            rejected = [await call(slices, f"last{n}", tenant) for n, slices in enumerate(gateways)]
            assert all(isinstance(each, Rejection) for each in rejected)
        for slices in gateways:
            await slices.stop()
        for tenant in TENANTS:
            assert await first.remaining(charges(tenant), now=time.time()) == (0, LIMIT, 0)


async def test_every_operation_of_the_storage(redises: Cluster | Watched) -> None:
    async with opened(redises.url, "me") as storage:
        for tenant in ("a", "b%7D", "%7B"):
            assert isinstance(await storage.reserve(f"{tenant}/r", charges(tenant), lease_seconds=30, now=0.0), Grant)
            assert await storage.settle(f"{tenant}/r", [1, 0, 1], now=0.0)
            documents = {name: Document(name.encode(), b"body") for name in "xyz"}
            for name, document in documents.items():
                assert await storage.put_document(tenant, name, document, ttl_seconds=60, max_bytes=1000)
            assert await storage.get_heads(tenant, ["x", "none", "z"]) == [b"x", None, b"z"]
            assert await storage.get_document(tenant, "y") == documents["y"]
            assert await storage.delete_document(tenant, "y") and await storage.delete_some_documents(tenant) == 2
            await storage.put(f"cache:{tenant}", b"answer", ttl_seconds=60)
            assert await storage.get(f"cache:{tenant}") == b"answer"
        record = KeyRecord("id", "t", "hmac-sha256:00", "2026-01-01T00:00:00Z")
        assert await storage.change_key(record) and not await storage.change_key(record)
        assert await storage.get_key("id") == record and await storage.list_keys() == [record]
        changed = StoredRecord("tenant", "t", "{}")
        assert await storage.change_record(changed)
        assert list((await storage.records_since("")).records) == [changed]
        messages, position = await storage.publish_and_read(b"hello", "")
        assert messages == [b"hello"] and await storage.publish_and_read(b"", position) == ([], position)
        assert await storage.count_replicas(alive_seconds=9.0, now=0.0) == 1
        assert await storage.expire_leases("me", now=0.0) == 0


async def test_batches(redises: Cluster | Watched) -> None:
    store = RedisBatchStore(redises.url)
    await store.open()
    file, batch = a_file(), a_batch()
    await store.append(file.id, b"content")
    assert await store.read(file.id, 3, 2) == b"te"
    assert await store.add_file(file, max_stored_bytes=10) and not await store.add_file(a_file(1), max_stored_bytes=10)
    assert await store.add_batch(batch, max_open=1) and not await store.add_batch(a_batch(1), max_open=1)
    changed = await store.update(batch.id, lambda each: msgspec.structs.replace(each, status=BatchStatus.IN_PROGRESS))
    found = await store.batch(batch.id)
    assert changed is not None and found is not None and found.status is changed.status is BatchStatus.IN_PROGRESS
    assert await store.files("t", purpose=None, after=None, limit=9, newest_first=True) == [file]
    assert await store.open_batches() == [found] and await store.delete_file(file)
    await store.close()


async def test_a_shipped_ledger_is_collected(redises: Cluster | Watched, tmp_path: Path) -> None:
    async with Ledger(tmp_path / "a", "one") as ledger:
        for _ in range(20):
            ledger.append(a_receipt())
        while ledger.lag_seconds:
            await asyncio.sleep(0.01)
        await Shipper(redises.url, ledger, "one").run(forever=False)
    assert [*(await asyncio.to_thread(collect, redises.url, tmp_path / "b")).values()] == [20]
    read: Any = lambda folder: [file.read_bytes() for file in sorted(folder.glob("*/*.jsonl"))]  # noqa: E731
    assert read(tmp_path / "a") == read(tmp_path / "b")


async def test_a_failover_is_followed(redises: Cluster | Watched) -> None:
    """The last test of the module, because the killed primary does not come back."""
    async with opened(redises.url, "me") as storage:
        for tenant in TENANTS:
            wanted = charges(f"{tenant}f")
            assert isinstance(await storage.reserve(f"{tenant}f/r", wanted, lease_seconds=900, now=0.0), Grant)
        await asyncio.sleep(0.5)  # replication is asynchronous
        await asyncio.to_thread(redises.fail_over)
        for tenant in TENANTS:
            deadline = time.monotonic() + PATIENT_SECONDS
            while True:
                try:
                    assert await storage.settle(f"{tenant}f/r", [1, 0, 1], now=0.0)
                    break
                except StorageUnavailable:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.1)
        assert [await storage.remaining(charges(f"{each}f"), now=0.0) for each in TENANTS] == [(99, 100, 99)] * 9


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://a:1", "SERVICE"),
        ("redis+sentinel://a:1/s/x", "SERVICE/DATABASE"),
        ("redis+sentinel://a:1/s?sentinel_secret=x", "no parameter sentinel_secret"),
        ("redis+cluster://,a", "no host"),
        ("redis+ring://a", "unknown scheme"),
    ],
)
def test_an_unusable_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_storage(url)


def test_the_parts_of_a_url() -> None:
    url = f"rediss+sentinel://me:p%40ss@a:1,b/{SERVICE}/3?sentinel_password=q"
    client = redis_client(url)
    pool = client.connection_pool
    assert [(each.connection_pool.connection_kwargs["host"], each.connection_pool.connection_kwargs["port"],
             each.connection_pool.connection_kwargs["password"]) for each in pool.sentinel_manager.sentinels] == [
        ("a", 1, "q"), ("b", 26379, "q"),
    ]  # fmt: skip
    named = pool.connection_kwargs
    assert (pool.service_name, named["db"], named["username"], named["password"]) == (SERVICE, 3, "me", "p@ss")
