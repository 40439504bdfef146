"""The Redis engine against a real redis-server: its clock, expiry, restarts, outages and cluster slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.storage import redis as redis_engine
from gateway.storage.base import (
    OPERATION_TIMEOUT_SECONDS,
    Charge,
    Document,
    Grant,
    KeyRecord,
    RateCharge,
    Rejection,
    SlotCharge,
    SpendCharge,
)
from gateway.storage.redis import RedisStorage
from tests.redis_server import RedisServer, own_redis_server, redis_server, start_redis

__all__ = ["own_redis_server", "redis_server"]

LEASE_SECONDS = 30.0
PATIENT_SECONDS = 60.0  # these tests must not fail on a busy machine


@asynccontextmanager
async def opened(
    server: RedisServer, *, owner: str = "", timeout_seconds: float = PATIENT_SECONDS
) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(server.url, owner=owner, timeout_seconds=timeout_seconds)
    await storage.open()
    try:
        yield storage
    finally:
        await storage.close()


def all_kinds(tenant: str) -> list[Charge]:
    return [
        RateCharge(f"{tenant}/requests", 1, 1000, 60.0),
        RateCharge(f"{tenant}/tokens", 100, 1_000_000, 60.0),
        SlotCharge(f"{tenant}/concurrency", 1000),
        SpendCharge(f"{tenant}/budget/2026-11", 100, 10**9, 5_000_000.0),
    ]


async def reserve(storage: RedisStorage, name: str, *charges: Charge, now: float = 0.0) -> Grant | Rejection:
    return await storage.reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)


async def test_a_rejection_writes_nothing(redis_server: RedisServer) -> None:
    """For each kind of charge that may exceed its limit."""
    full: list[Charge] = [
        RateCharge("refusing/requests", 1, 1, 60.0),
        SlotCharge("refusing/concurrency", 1),
        SpendCharge("refusing/budget/2026-11", 1, 1, 5_000_000.0),
    ]
    fits = RateCharge("refusing/tokens", 1, 100, 60.0)
    async with opened(redis_server) as storage:
        assert isinstance(await reserve(storage, "refusing/first", *full, fits), Grant)
        with redis_server.client() as client:
            keys = sorted(client.scan_iter("wp:{refusing}*"))
            before = {key: client.dump(key) for key in keys}
            for number, charge in enumerate(full):
                assert isinstance(await reserve(storage, f"refusing/{number}", fits, charge), Rejection)
            assert {key: client.dump(key) for key in sorted(client.scan_iter("wp:{refusing}*"))} == before != {}


async def test_reserve_and_settle_are_one_script_call_each(redis_server: RedisServer) -> None:
    async with opened(redis_server, owner="me") as storage:
        await reserve(storage, "counted/first", *all_kinds("counted"))  # also registers the tenant
        with redis_server.client() as client:
            client.config_resetstat()
            await asyncio.gather(*(reserve(storage, f"counted/{n}", *all_kinds("counted")) for n in range(100)))
            await asyncio.gather(*(storage.settle(f"counted/{n}", [1, 50, 0, 7], now=0.0) for n in range(100)))
            stats: dict[str, Any] = client.info("commandstats")
            clients: dict[str, Any] = client.info("clients")
    inside_scripts = {"GET", "SET", "TIME", "PTTL", "PEXPIRE", "DEL", "PERSIST"}
    sent = {name.removeprefix("cmdstat_").partition("|")[0].upper(): row["calls"] for name, row in stats.items()}
    assert sent.pop("EVALSHA") == 200
    assert not [name for name in sent if name not in inside_scripts and name[0] not in "HZ" and name != "CONFIG"]
    assert clients["connected_clients"] <= redis_engine.MAX_PIPELINES + 1


async def test_the_clock_of_redis_decides(redis_server: RedisServer) -> None:
    """A replica whose clock is an hour ahead is granted no more than the others."""
    charge = RateCharge("skewed/tokens", 100, 100, 3600.0)
    async with opened(redis_server) as storage:
        now = time.time()
        assert isinstance(await reserve(storage, "skewed/a", charge, now=now), Grant)
        assert isinstance(await reserve(storage, "skewed/b", charge, now=now + 3600), Rejection)


async def test_every_key_expires(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.flushall()
        async with opened(redis_server, owner="me") as storage:
            for number in range(3):
                await reserve(storage, f"tidy/{number}", *all_kinds("tidy"))
            await storage.settle("tidy/0", [1, 2, 0, 4], now=0.0)
            await storage.extend_lease("tidy/1", lease_seconds=LEASE_SECONDS, now=0.0)
            await storage.put("blob", b"x", ttl_seconds=60.0)
            await storage.put_document("tidy", "d", Document(b"head", b"body"), ttl_seconds=60.0, max_bytes=1000)
        keys: list[bytes] = client.keys("*")
        assert len(keys) > 8
        assert [key for key in keys if client.pttl(key) == -1] == []
        assert all(b"{" in key for key in keys if b":blob:" not in key)


async def test_an_account_and_its_leases_expire_together(redis_server: RedisServer) -> None:
    """Otherwise an amount held by a crashed gateway would stay held for as long as the account lives."""
    money = SpendCharge("pair/budget/2026-11", 10, 100, 1000.0)
    async with opened(redis_server) as storage:
        with redis_server.client() as client:

            def apart_milliseconds() -> int:
                keys = (f"wp:{{pair}}:{kind}:pair/budget/2026-11" for kind in ("account", "leases"))
                times = [int(client.pexpiretime(key)) for key in keys]
                return max(times) - min(times)

            await reserve(storage, "pair/a", money)
            assert apart_milliseconds() < 1000, "Redis 7.0 reads its clock for each command of a script"
            await storage.settle("pair/a", [10], now=0.0)  # no lease is left: its key is gone
            client.pexpire("wp:{pair}:account:pair/budget/2026-11", 1_500_000)  # some time later
            await reserve(storage, "pair/b", money)
            assert apart_milliseconds() < 1000


async def test_a_shorter_lease_does_not_shorten_the_expiry_for_a_longer_one(redis_server: RedisServer) -> None:
    slot = SlotCharge("mixed/concurrency", 2)
    async with opened(redis_server) as storage:
        await storage.reserve("mixed/long", [slot], lease_seconds=600.0, now=0.0)
        await storage.reserve("mixed/short", [slot], lease_seconds=1.0, now=0.0)
        with redis_server.client() as client:
            for kind in ("account", "leases"):
                assert client.pttl(f"wp:{{mixed}}:{kind}:mixed/concurrency") > 1_000_000


async def test_a_frozen_redis_is_unavailable_within_the_timeout_and_usable_once_thawed(
    own_redis_server: RedisServer,
) -> None:
    async with opened(own_redis_server, timeout_seconds=OPERATION_TIMEOUT_SECONDS) as storage:
        slot = SlotCharge("t/concurrency", 1)
        own_redis_server.freeze()
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(reserve(storage, f"t/{n}", slot) for n in range(20)), return_exceptions=True),
            timeout=20 * OPERATION_TIMEOUT_SECONDS,  # all at the same time, not one after the other
        )
        assert all(isinstance(outcome, StorageUnavailable) for outcome in outcomes)
        with pytest.raises(StorageUnavailable):
            await storage.get("anything")
        own_redis_server.thaw()
        assert await eventually(storage, "t/after", RateCharge("t/requests", 1, 10, 60.0)) == Grant((9,))


async def test_a_reservation_that_timed_out_can_be_settled(own_redis_server: RedisServer) -> None:
    """The limiter settles a reservation of unknown outcome with zero, so that it holds nothing."""
    async with opened(own_redis_server, timeout_seconds=OPERATION_TIMEOUT_SECONDS) as storage:
        slot = SlotCharge("t/concurrency", 1)
        own_redis_server.freeze()
        with pytest.raises(StorageUnavailable):
            await reserve(storage, "t/unknown", slot)
        own_redis_server.thaw()
        await eventually(storage, "t/other", RateCharge("t/requests", 1, 10, 60.0))
        await storage.settle("t/unknown", [0], now=0.0)
        assert isinstance(await reserve(storage, "t/after", slot), Grant)


async def test_budgets_and_keys_survive_a_restart_of_redis(own_redis_server: RedisServer) -> None:
    """With its append-only file. The engine loads the script again."""
    charge = SpendCharge("t/budget/2026-11", 60, 100, 86_400.0)
    record = KeyRecord("id", "t", "hmac-sha256:00", "2026-11-20T00:00:00Z")
    async with opened(own_redis_server) as storage:
        await reserve(storage, "t/a", charge)
        await storage.settle("t/a", [60], now=0.0)
        await storage.put_key(record)
        with own_redis_server.client() as client:
            client.config_set("appendfsync", "always")
            client.set("flush", "1")
        own_redis_server.stop()
        with pytest.raises(StorageUnavailable):
            await reserve(storage, "t/b", charge)
        own_redis_server.start()
        assert await storage.get_key("id") == record
        assert await reserve(storage, "t/c", charge) == Rejection(0, 40, None)


async def test_a_flushed_script_is_loaded_again(own_redis_server: RedisServer) -> None:
    async with opened(own_redis_server) as storage:
        with own_redis_server.client() as client:
            client.script_flush()
        charge = RateCharge("t/requests", 1, 10, 60.0)
        outcomes = await asyncio.gather(*(reserve(storage, f"t/{n}", charge) for n in range(3)))
        assert outcomes == [Grant((9,)), Grant((8,)), Grant((7,))]


async def test_a_redis_out_of_memory_is_unavailable(own_redis_server: RedisServer) -> None:
    async with opened(own_redis_server) as storage:
        with own_redis_server.client() as client:
            client.config_set("maxmemory", "1")
        with pytest.raises(StorageUnavailable, match="maxmemory"):
            await reserve(storage, "t/a", RateCharge("t/requests", 1, 10, 60.0))


async def test_an_unreachable_redis_is_unavailable() -> None:
    storage = RedisStorage("unix:///nonexistent/redis.sock")
    with pytest.raises(StorageUnavailable, match=r"cannot be reached: .*nonexistent"):
        await storage.open()
    with pytest.raises(StorageUnavailable) as raised:
        await storage.get("key")
    assert "nonexistent" not in raised.value.message  # clients must not see its address
    await storage.close()


@pytest.fixture
def cluster() -> Iterator[RedisServer]:
    """One cluster node that owns all slots. It rejects a script whose keys are in several slots."""
    for server in start_redis(cluster=True):
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            deadline = time.monotonic() + 20
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                assert time.monotonic() < deadline
                time.sleep(0.01)
        yield server


async def test_all_keys_of_a_tenant_are_in_one_cluster_slot(cluster: RedisServer) -> None:
    async with opened(cluster, owner="me") as storage:
        for tenant in ("t", "u%7D", "%7B"):
            assert isinstance(await reserve(storage, f"{tenant}/a", *all_kinds(tenant)), Grant)
            assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=0.0)
            assert len(await storage.remaining(all_kinds(tenant), now=0.0)) == 4
            assert await storage.settle(f"{tenant}/a", [1, 2, 0, 4], now=0.0)
            await storage.force_reserve(f"{tenant}/b", all_kinds(tenant), lease_seconds=LEASE_SECONDS, now=0.0)
            assert await storage.release_slots(f"{tenant}/b", now=0.0)
        assert await storage.count_replicas(alive_seconds=9.0, now=0.0) == 1
        assert await storage.expire_leases("me", now=0.0) == 3
        with cluster.client() as client:
            keys: list[bytes] = client.keys("wp:{t}*")
            assert len({client.execute_command("CLUSTER KEYSLOT", key) for key in keys}) == 1


async def eventually(storage: RedisStorage, name: str, charge: Charge) -> Grant | Rejection:
    """Reserve as soon as Redis answers again."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return await reserve(storage, name, charge)
        except StorageUnavailable:
            assert time.monotonic() < deadline


async def test_a_replica_seen_before_the_clock_was_set_back_is_not_counted(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.flushall()
    one, other = (
        RedisStorage(redis_server.url, owner=owner, timeout_seconds=PATIENT_SECONDS, clock="caller")
        for owner in ("one", "other")
    )
    now, later = 1_800_000_000.0, 1_800_018_000.0
    assert [await each.count_replicas(alive_seconds=30.0, now=later) for each in (one, other)] == [1, 2]
    assert await one.count_replicas(alive_seconds=30.0, now=now) == 1
    assert await other.count_replicas(alive_seconds=30.0, now=now + 1) == 2
    for each in (one, other):
        await each.close()


async def test_lists_of_documents_that_redis_has_evicted_are_rebuilt(redis_server: RedisServer) -> None:
    document = Document(b"head", b"x" * 80)
    for lost in ("documents", "document_bytes"):
        async with opened(redis_server) as storage:
            for number in range(3):
                await storage.put_document(lost, f"{number}", document, ttl_seconds=60.0 + number, max_bytes=300)
            with redis_server.client() as client:
                client.delete(f"wp:{{{lost}}}:{lost}")
                for number in range(3, 9):
                    await storage.put_document(lost, f"{number}", document, ttl_seconds=60.0 + number, max_bytes=300)
                assert client.zrange(f"wp:{{{lost}}}:documents", -3, -1) == [b"6", b"7", b"8"]
                assert await storage.get_heads(lost, ["5", "6", "7", "8"]) == [None, b"head", b"head", b"head"]


async def test_expired_documents_are_removed_from_the_lists(redis_server: RedisServer) -> None:
    async with opened(redis_server) as storage:
        for number in range(3):
            await storage.put_document("gone", f"{number}", Document(b"", b"x"), ttl_seconds=0.001, max_bytes=300)
        while await storage.get_heads("gone", ["0", "1", "2"]) != [None] * 3:
            pass
        await storage.put_document("gone", "last", Document(b"", b"x"), ttl_seconds=60.0, max_bytes=300)
        with redis_server.client() as client:
            assert client.hgetall("wp:{gone}:document_bytes") == {b"total": b"5", b"=last": b"5"}
            assert client.zrange("wp:{gone}:documents", 0, -1) == [b"last"]
