"""The contract of the storage ports, run over every engine: on a real file and against a real Redis."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.storage import open_storage
from gateway.storage.base import (
    DELETE_BATCH_SIZE,
    HELD_RETRY_SECONDS,
    PEER_MESSAGES_KEPT,
    PEER_MESSAGES_PER_READ,
    RECORDS_PER_READ,
    REMEMBER_SECONDS,
    Charge,
    Document,
    Grant,
    KeyRecord,
    RateCharge,
    Rejection,
    SlotCharge,
    SpendCharge,
    Storage,
    StoredRecord,
)
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

NOW = 1_800_000_000.0
LEASE_SECONDS = 30.0
PATIENT_SECONDS = 60.0  # these tests must not fail on a busy machine
_tenants = (f"t{number}" for number in itertools.count())  # all tests share one Redis


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    engine: Storage
    if request.param == "memory":
        engine = MemoryStorage(owner="me", blob_bytes=1000, document_bytes=1000)
    elif request.param == "sqlite":
        engine = SqliteStorage(
            f"sqlite:///{tmp_path / 'state.db'}",
            owner="me",
            blob_bytes=1000,
            document_bytes=1000,
            timeout_seconds=PATIENT_SECONDS,
        )
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        engine = RedisStorage(
            server.url,
            owner="me",
            blob_bytes=1000,
            document_bytes=1000,
            timeout_seconds=PATIENT_SECONDS,
            clock="caller",
        )
    await engine.open()
    yield engine
    await engine.close()


@pytest.fixture
def tenant() -> str:
    return next(_tenants)


async def reserve(
    storage: Storage, name: str, *charges: Charge, now: float = NOW, lease_seconds: float = LEASE_SECONDS
) -> Grant | Rejection:
    return await storage.reserve(name, charges, lease_seconds=lease_seconds, now=now)


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=0.01)


def rate(tenant: str, amount: int, *, limit: int = 100, period_seconds: float = 100.0) -> RateCharge:
    return RateCharge(f"{tenant}/tokens", amount, limit, period_seconds)


def spend(tenant: str, amount: int, *, limit: int = 100) -> SpendCharge:
    return SpendCharge(f"{tenant}/budget/2026-11", amount, limit, 86_400.0)


def slot(tenant: str, *, limit: int = 2) -> SlotCharge:
    return SlotCharge(f"{tenant}/concurrency", limit)


class TestRate:
    async def test_a_burst_is_at_most_the_limit(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", rate(tenant, 60)) == Grant((40,))
        refused = await reserve(storage, f"{tenant}/b", rate(tenant, 50))
        assert refused == Rejection(0, 40, about(10.0))
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 40)) == Grant((0,))

    async def test_refills_steadily(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 100))
        assert isinstance(await reserve(storage, f"{tenant}/b", rate(tenant, 26), now=NOW + 25), Rejection)
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 25), now=NOW + 25) == Grant((0,))
        assert await reserve(storage, f"{tenant}/d", rate(tenant, 1), now=NOW + 1000) == Grant((99,))

    async def test_retry_after_is_exactly_long_enough(self, storage: Storage, tenant: str) -> None:
        charge = rate(tenant, 1, limit=7, period_seconds=60.0)
        for number in range(7):
            await reserve(storage, f"{tenant}/{number}", charge)
        refused = await reserve(storage, f"{tenant}/x", charge)
        assert isinstance(refused, Rejection) and refused.retry_after_seconds is not None
        assert isinstance(
            await reserve(storage, f"{tenant}/y", charge, now=NOW + refused.retry_after_seconds - 0.001), Rejection
        )
        assert isinstance(await reserve(storage, f"{tenant}/z", charge, now=NOW + refused.retry_after_seconds), Grant)

    async def test_more_than_the_limit_is_never_granted(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", rate(tenant, 101)) == Rejection(0, 100, None)

    async def test_settling_returns_the_unused_amount(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 100))
        assert await storage.settle(f"{tenant}/a", [30], now=NOW)
        assert await reserve(storage, f"{tenant}/b", rate(tenant, 70)) == Grant((0,))

    async def test_usage_beyond_the_reservation_becomes_debt(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 50))
        assert await storage.settle(f"{tenant}/a", [170], now=NOW)
        refused = await reserve(storage, f"{tenant}/b", rate(tenant, 1))
        assert refused == Rejection(0, 0, about(71.0))

    async def test_a_refund_excludes_what_has_refilled_meanwhile(self, storage: Storage, tenant: str) -> None:
        """A naive refund would grant 198 in one instant: see `leaky_bucket`."""
        await reserve(storage, f"{tenant}/a", rate(tenant, 100), lease_seconds=200.0)
        later = NOW + 99
        assert await reserve(storage, f"{tenant}/b", rate(tenant, 98), now=later) == Grant((1,))
        assert await storage.settle(f"{tenant}/a", [0], now=later)
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 3), now=later) == Rejection(0, 2, about(1.0))
        assert isinstance(await reserve(storage, f"{tenant}/d", rate(tenant, 2), now=later), Grant)

    async def test_a_bucket_that_was_never_empty_refunds_everything(self, storage: Storage, tenant: str) -> None:
        """A call longer than the period, at saturation: its whole unused amount is refunded."""
        await reserve(storage, f"{tenant}/long", rate(tenant, 50))
        await reserve(storage, f"{tenant}/0", rate(tenant, 50))
        for step in range(1, 21):
            now = NOW + 10 * step
            assert await reserve(storage, f"{tenant}/{step}", rate(tenant, 10), now=now) == Grant((0,))
            assert await storage.extend_lease(f"{tenant}/long", lease_seconds=LEASE_SECONDS, now=now)
        assert await storage.settle(f"{tenant}/long", [0], now=NOW + 200)
        assert await reserve(storage, f"{tenant}/next", rate(tenant, 50), now=NOW + 200) == Grant((0,))

    async def test_refunds_out_of_order(self, storage: Storage, tenant: str) -> None:
        """If neither a nor x had used anything, the bucket would have been empty before b. So only b's 10 are in it."""
        steps = [("z", 60, 0), ("x", 40, 50), ("a", 50, 51), ("b", 10, 80)]
        for name, amount, after in steps:
            granted = await reserve(
                storage, f"{tenant}/{name}", rate(tenant, amount), now=NOW + after, lease_seconds=200.0
            )
            assert isinstance(granted, Grant)
        assert await storage.settle(f"{tenant}/a", [0], now=NOW + 80)
        assert await storage.settle(f"{tenant}/x", [0], now=NOW + 80)
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 1), now=NOW + 80) == Grant((89,))


class TestSlots:
    async def test_at_most_the_limit_of_slots(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", slot(tenant)) == Grant((1,))
        assert await reserve(storage, f"{tenant}/b", slot(tenant)) == Grant((0,))
        assert await reserve(storage, f"{tenant}/c", slot(tenant)) == Rejection(0, 0, HELD_RETRY_SECONDS)
        assert await storage.settle(f"{tenant}/a", [0], now=NOW)
        assert await reserve(storage, f"{tenant}/d", slot(tenant)) == Grant((0,))

    async def test_a_slot_returns_when_its_lease_ends(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1))
        before, after = NOW + LEASE_SECONDS - 0.001, NOW + LEASE_SECONDS
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1), now=before), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/c", slot(tenant, limit=1), now=after), Grant)

    async def test_extending_the_lease_keeps_slots_and_budget(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1), spend(tenant, 60))
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + 20)
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + 40)
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1), now=NOW + 69), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/c", spend(tenant, 41), now=NOW + 69), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/d", slot(tenant, limit=1), now=NOW + 70), Grant)

    async def test_a_lease_that_has_ended_cannot_be_extended(self, storage: Storage, tenant: str) -> None:
        assert not await storage.extend_lease(f"{tenant}/never", lease_seconds=LEASE_SECONDS, now=NOW)
        await reserve(storage, f"{tenant}/a", slot(tenant))
        assert not await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + LEASE_SECONDS)
        await reserve(storage, f"{tenant}/b", slot(tenant))
        await storage.settle(f"{tenant}/b", [0], now=NOW)
        assert not await storage.extend_lease(f"{tenant}/b", lease_seconds=LEASE_SECONDS, now=NOW)

    async def test_release_slots_keeps_the_budget_and_the_rates(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1), spend(tenant, 60), rate(tenant, 60))
        assert await storage.release_slots(f"{tenant}/a", now=NOW)
        assert not await storage.release_slots(f"{tenant}/a", now=NOW)
        assert isinstance(await reserve(storage, f"{tenant}/b", spend(tenant, 41)), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/b", rate(tenant, 41)), Rejection)
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1)), Grant)
        # Extending its lease takes no slot. Neither settling it nor the end of its lease frees another call's slot.
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW)
        assert await storage.settle(f"{tenant}/a", [1, 20, 20], now=NOW)
        assert isinstance(await reserve(storage, f"{tenant}/c", slot(tenant, limit=1)), Rejection)
        assert await reserve(storage, f"{tenant}/d", spend(tenant, 80), rate(tenant, 80)) == Grant((0, 0))

    async def test_the_end_of_a_lease_without_slots_frees_no_slot_of_another_call(
        self, storage: Storage, tenant: str
    ) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1))
        assert await storage.release_slots(f"{tenant}/a", now=NOW)
        later = NOW + LEASE_SECONDS - 1
        assert isinstance(await reserve(storage, f"{tenant}/b", slot(tenant, limit=1), now=later), Grant)
        assert isinstance(await reserve(storage, f"{tenant}/c", slot(tenant, limit=1), now=later + 2), Rejection)

    async def test_release_slots_without_slots_changes_nothing(self, storage: Storage, tenant: str) -> None:
        assert not await storage.release_slots(f"{tenant}/unknown", now=NOW)
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert not await storage.release_slots(f"{tenant}/a", now=NOW)
        assert await storage.settle(f"{tenant}/a", [60], now=NOW)


class TestSpend:
    async def test_spent_and_held_stay_within_the_limit(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a", spend(tenant, 60)) == Grant((40,))
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 50)) == Rejection(0, 40, HELD_RETRY_SECONDS)
        assert await storage.settle(f"{tenant}/a", [55], now=NOW)
        assert await reserve(storage, f"{tenant}/c", spend(tenant, 46)) == Rejection(0, 45, None)
        assert await reserve(storage, f"{tenant}/d", spend(tenant, 45)) == Grant((0,))

    async def test_a_held_budget_returns_when_its_lease_ends(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 100), now=NOW + LEASE_SECONDS) == Grant((0,))

    async def test_usage_is_counted_after_the_lease_has_ended(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert await storage.settle(f"{tenant}/a", [60], now=NOW + LEASE_SECONDS + REMEMBER_SECONDS - 1)
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 41), now=NOW + 60) == Rejection(0, 40, None)

    async def test_a_reservation_is_forgotten_remember_seconds_after_its_lease(
        self, storage: Storage, tenant: str
    ) -> None:
        await reserve(storage, f"{tenant}/a", spend(tenant, 60))
        assert not await storage.settle(f"{tenant}/a", [60], now=NOW + LEASE_SECONDS + REMEMBER_SECONDS)
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 100), now=NOW + 60) == Grant((0,))

    async def test_a_reservation_of_zero_can_still_spend(self, storage: Storage, tenant: str) -> None:
        """A call without a price reserves zero, which the Redis script treats separately."""
        assert await reserve(storage, f"{tenant}/a", spend(tenant, 0)) == Grant((100,))
        assert await storage.settle(f"{tenant}/a", [120], now=NOW)
        assert await reserve(storage, f"{tenant}/b", spend(tenant, 0)) == Rejection(0, 0, None)

    async def test_sums_are_exact_beyond_the_precision_of_a_double(self, storage: Storage, tenant: str) -> None:
        limit = 2**54 + 4
        for number, amount in enumerate([2**53 + 1, 2**53 + 1, 2]):
            charge = SpendCharge(f"{tenant}/budget/total", amount, limit, math.inf)
            await reserve(storage, f"{tenant}/{number}", charge)
            await storage.settle(f"{tenant}/{number}", [amount], now=NOW)
        charge = SpendCharge(f"{tenant}/budget/total", 1, limit, math.inf)
        assert await reserve(storage, f"{tenant}/x", charge) == Rejection(0, 0, None)


class TestReservation:
    async def test_all_or_none(self, storage: Storage, tenant: str) -> None:
        charges = rate(tenant, 10), slot(tenant), spend(tenant, 60)
        assert await reserve(storage, f"{tenant}/a", *charges) == Grant((90, 1, 40))
        for number in range(5):
            assert await reserve(storage, f"{tenant}/no{number}", *charges) == Rejection(2, 40, HELD_RETRY_SECONDS)
        assert await reserve(storage, f"{tenant}/b", rate(tenant, 1), slot(tenant)) == Grant((89, 0))

    async def test_a_rejection_names_the_first_charge_that_does_not_fit(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant, limit=1), spend(tenant, 100))
        refused = await reserve(storage, f"{tenant}/b", rate(tenant, 1), spend(tenant, 1), slot(tenant, limit=1))
        assert refused == Rejection(1, 0, HELD_RETRY_SECONDS)

    async def test_exactly_one_of_many_concurrent_settlements_counts(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 60), slot(tenant, limit=1), spend(tenant, 60))
        ended = await asyncio.gather(*(storage.settle(f"{tenant}/a", [50, 0, 40], now=NOW) for _ in range(20)))
        assert sorted(ended) == [False] * 19 + [True]
        left = await reserve(storage, f"{tenant}/b", rate(tenant, 1), slot(tenant, limit=1), spend(tenant, 1))
        assert left == Grant((49, 0, 59))

    async def test_concurrent_calls_share_one_limit(self, storage: Storage, tenant: str) -> None:
        """Another gateway granted 663 tokens on a limit of 100 to concurrent calls."""
        amounts = [7 + number % 4 for number in range(80)]
        outcomes = await asyncio.gather(
            *(reserve(storage, f"{tenant}/{number}", rate(tenant, amount)) for number, amount in enumerate(amounts))
        )
        granted = sum(amount for amount, outcome in zip(amounts, outcomes, strict=True) if isinstance(outcome, Grant))
        assert 93 < granted <= 100

    async def test_tenants_do_not_share(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", rate(tenant, 100), slot(tenant, limit=1), spend(tenant, 100))
        other = f"{tenant}%7D%7B"
        mine = rate(other, 100), slot(other, limit=1), spend(other, 100)
        assert await reserve(storage, f"{other}/a", *mine) == Grant((0, 0, 0))

    async def test_a_reservation_without_charges(self, storage: Storage, tenant: str) -> None:
        assert await reserve(storage, f"{tenant}/a") == Grant(())
        assert await storage.settle(f"{tenant}/a", [], now=NOW)

    async def test_invalid_arguments_raise_value_error(self, storage: Storage, tenant: str) -> None:
        await reserve(storage, f"{tenant}/a", slot(tenant))
        with pytest.raises(ValueError, match="already open"):
            await reserve(storage, f"{tenant}/a", slot(tenant))
        with pytest.raises(ValueError, match="occurs twice"):
            await reserve(storage, f"{tenant}/b", slot(tenant), slot(tenant))
        with pytest.raises(ValueError, match="another tenant"):
            await reserve(storage, f"{tenant}/b", slot("another"))
        with pytest.raises(ValueError, match="1 charges, but is settled with 2"):
            await storage.settle(f"{tenant}/a", [0, 0], now=NOW)
        with pytest.raises(ValueError, match="outside"):
            await storage.settle(f"{tenant}/a", [-1], now=NOW)
        with pytest.raises(ValueError, match="outside"):
            await reserve(storage, f"{tenant}/b", spend(tenant, -1))
        assert await storage.settle(f"{tenant}/a", [0], now=NOW)

    async def test_expire_leases_ends_all_leases_of_an_owner(self, storage: Storage, tenant: str) -> None:
        charges = rate(tenant, 60), slot(tenant, limit=1), spend(tenant, 60)
        await reserve(storage, f"{tenant}/a", *charges)
        assert await storage.expire_leases("another owner", now=NOW) == 0
        assert await storage.expire_leases("me", now=NOW) == 1
        assert await storage.expire_leases("me", now=NOW) == 0
        assert not await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW)
        left = await reserve(storage, f"{tenant}/b", rate(tenant, 1), slot(tenant, limit=1), spend(tenant, 1))
        assert left == Grant((39, 0, 99))
        assert await storage.settle(f"{tenant}/a", [10, 0, 10], now=NOW)  # the process of that owner was only draining
        assert await reserve(storage, f"{tenant}/c", rate(tenant, 1), spend(tenant, 1)) == Grant((88, 88))


class TestBlobs:
    async def test_get_returns_what_was_put(self, storage: Storage) -> None:
        assert await storage.get("nothing") is None
        await storage.put("a", b"\x00\xff", ttl_seconds=60.0)
        assert await storage.get("a") == b"\x00\xff"
        await storage.put("a", b"other", ttl_seconds=60.0)
        assert await storage.get("a") == b"other"

    async def test_an_expired_entry_is_gone(self, storage: Storage) -> None:
        await storage.put("short", b"value", ttl_seconds=0.001)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and await storage.get("short") is not None:
            pass
        assert await storage.get("short") is None

    async def test_an_entry_above_the_bound_is_not_stored(self, storage: Storage) -> None:
        await storage.put("large", b"x" * 1001, ttl_seconds=60.0)
        assert await storage.get("large") is None

    async def test_the_oldest_blobs_are_evicted(self, storage: Storage) -> None:
        if isinstance(storage, RedisStorage):
            pytest.skip("all blobs in Redis together are bounded by its maxmemory")
        for number in range(20):
            await storage.put(f"b{number:02}", b"x" * 97, ttl_seconds=60.0)
        kept = [number for number in range(20) if await storage.get(f"b{number:02}") is not None]
        assert kept == list(range(10, 20))


async def put(
    storage: Storage,
    tenant: str,
    name: str,
    document: Document | int = 10,
    *,
    ttl_seconds: float = 60.0,
    max_bytes: int = 1000,
) -> bool:
    """Put a document, given as such or by its size in bytes."""
    if isinstance(document, int):
        document = Document(b"h", b"b" * (document - len(name) - 1))
    return await storage.put_document(tenant, name, document, ttl_seconds=ttl_seconds, max_bytes=max_bytes)


async def names_of(storage: Storage, tenant: str, names: list[str]) -> list[str]:
    """Those of the names that exist."""
    return [name for name in names if await storage.get_document(tenant, name) is not None]


class TestDocuments:
    async def test_get_returns_what_was_put(self, storage: Storage, tenant: str) -> None:
        assert await storage.get_document(tenant, "a") is None
        document = Document(b"\x00\xff", b"")
        assert await put(storage, tenant, "a", document)
        assert await storage.get_document(tenant, "a") == document
        other = Document(b"", b"\xff")
        assert await put(storage, tenant, "a", other)
        assert await storage.get_document(tenant, "a") == other

    async def test_heads_are_in_the_order_of_the_names(self, storage: Storage, tenant: str) -> None:
        assert await storage.get_heads(tenant, []) == []
        for name in "abc":
            await put(storage, tenant, name, Document(name.encode(), b"body"))
        assert await storage.get_heads(tenant, ["c", "x", "a", "c"]) == [b"c", None, b"a", b"c"]
        many = [f"{number}" for number in range(1000)]
        assert await storage.get_heads(tenant, [*many, "b"]) == [None] * 1000 + [b"b"]

    async def test_a_deleted_document_is_gone(self, storage: Storage, tenant: str) -> None:
        await put(storage, tenant, "a")
        await put(storage, tenant, "b")
        assert await storage.delete_document(tenant, "a")
        assert not await storage.delete_document(tenant, "a")
        assert await names_of(storage, tenant, ["a", "b"]) == ["b"]

    async def test_a_tenant_s_documents_are_deleted_in_batches(self, storage: Storage, tenant: str) -> None:
        names = [f"d{number}" for number in range(DELETE_BATCH_SIZE + 5)]
        for name in names:
            await put(storage, tenant, name, len(name) + 1)
        await put(storage, f"{tenant} too", "a")
        assert [await storage.delete_some_documents(tenant) for _ in range(3)] == [DELETE_BATCH_SIZE, 5, 0]
        assert await names_of(storage, tenant, names) == []
        assert await put(storage, tenant, "a", 900) and await names_of(storage, tenant, ["a"]) == ["a"]
        assert await names_of(storage, f"{tenant} too", ["a"]) == ["a"]

    async def test_tenants_do_not_share(self, storage: Storage) -> None:
        """Even if their names contain characters that are special in keys."""
        names = ["t", "t}", "t:document:a", "t/x", "T", "t "]
        for owner in names:
            await put(storage, owner, "a", Document(owner.encode(), b""))
        assert [(await storage.get_heads(owner, ["a"]))[0] for owner in names] == [owner.encode() for owner in names]
        assert await storage.delete_document("t", "a")
        assert await storage.get_document("t", "a") is None
        assert await storage.get_document("t ", "a") is not None

    async def test_an_expired_entry_is_gone(self, storage: Storage, tenant: str) -> None:
        await put(storage, tenant, "short", ttl_seconds=0.001)
        await put(storage, tenant, "long")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and await storage.get_heads(tenant, ["short"]) != [None]:
            pass
        assert await names_of(storage, tenant, ["short", "long"]) == ["long"]
        assert not await storage.delete_document(tenant, "short")

    async def test_an_entry_above_the_bound_is_not_stored(self, storage: Storage, tenant: str) -> None:
        await put(storage, tenant, "small")
        assert not await put(storage, tenant, "large", 1001, max_bytes=9999), "larger than the bound of the engine"
        assert not await put(storage, tenant, "larger", 501, max_bytes=500)
        assert await put(storage, tenant, "largest", 990)
        assert await names_of(storage, tenant, ["small", "large", "larger", "largest"]) == ["small", "largest"]

    async def test_the_tenant_s_oldest_documents_are_deleted_beyond_its_bound(
        self, storage: Storage, tenant: str
    ) -> None:
        names = [f"d{number:02}" for number in range(20)]
        for number, name in enumerate(names):
            assert await put(storage, tenant, name, 100, ttl_seconds=60.0 + number, max_bytes=550)
        assert await names_of(storage, tenant, names) == names[-5:]
        assert await put(storage, tenant, "large", 500, ttl_seconds=99.0, max_bytes=550)
        assert await names_of(storage, tenant, [*names, "large"]) == ["large"]

    async def test_the_oldest_of_the_largest_tenant_are_deleted_beyond_the_engine_s_bound(
        self, storage: Storage
    ) -> None:
        if isinstance(storage, RedisStorage):
            pytest.skip("all documents in Redis together are bounded by its memory")
        for number in range(3):
            await put(storage, "modest", f"m{number}", 100)
        greedy = [f"g{number:02}" for number in range(20)]
        for name in greedy:
            await put(storage, "greedy", name, 100)
        assert await names_of(storage, "modest", ["m0", "m1", "m2"]) == ["m0", "m1", "m2"]
        assert await names_of(storage, "greedy", greedy) == greedy[-7:]

    async def test_bytes_are_freed(self, storage: Storage, tenant: str) -> None:
        """By deletion, by expiry and by replacement."""
        await put(storage, tenant, "old", 300, ttl_seconds=0.001)
        await put(storage, tenant, "gone", 300)
        for _ in range(3):
            await put(storage, tenant, "kept", 300)
        await storage.delete_document(tenant, "gone")
        while await storage.get_document(tenant, "old") is not None:
            pass
        await put(storage, tenant, "more", 700)
        assert await names_of(storage, tenant, ["kept", "more"]) == ["kept", "more"]


class TestFolders:
    async def test_a_folder_lists_its_documents_in_the_order_of_their_names(
        self, storage: Storage, tenant: str
    ) -> None:
        for name in ("f/b", "f/a", "f/c/d", "f", "f0", "f.", "g/a", "f/\u00e9"):
            await put(storage, tenant, name)
        await put(storage, f"{tenant} too", "f/other")
        everything = ["f/a", "f/b", "f/c/d", "f/\u00e9"]
        assert await storage.list_documents(tenant, "f", limit=10) == everything
        assert await storage.list_documents(tenant, "f", limit=10, newest_first=True) == everything[::-1]
        assert await storage.list_documents(tenant, "f", limit=2) == everything[:2]
        for after, rest in (("f/a", 1), ("f/aa", 1), ("f/b", 2), ("f/z", 3), ("f", 0), ("g", 4), ("f/\u00e9", 4)):
            assert await storage.list_documents(tenant, "f", after=after, limit=10) == everything[rest:], after
        for after, rest in (("f/b", 3), ("f/bb", 2), ("f/\u00e9", 1), ("g", 0), ("f", 4)):
            listed = await storage.list_documents(tenant, "f", after=after, limit=10, newest_first=True)
            assert listed == everything[::-1][rest:], after
        assert await storage.list_documents(tenant, "none", limit=10) == []

    async def test_deleted_and_expired_documents_are_not_listed(self, storage: Storage, tenant: str) -> None:
        await put(storage, tenant, "f/short", ttl_seconds=0.001)
        for name in ("f/a", "f/b"):
            await put(storage, tenant, name)
        await storage.delete_document(tenant, "f/a")
        while await storage.get_document(tenant, "f/short") is not None:
            pass
        assert await storage.list_documents(tenant, "f", limit=10) == ["f/b"]
        while await storage.delete_some_documents(tenant):
            pass
        assert await storage.list_documents(tenant, "f", limit=10) == []

    async def test_a_long_folder_is_listed_page_by_page(self, storage: Storage, tenant: str) -> None:
        names = [f"f/{number:04}" for number in range(250)]
        for name in names:
            await storage.put_document(tenant, name, Document(b"", b""), ttl_seconds=60.0, max_bytes=10_000)
        kept = await storage.list_documents(tenant, "f", limit=1000)
        assert kept == names[-len(kept) :] and len(kept) > 100  # the bound of the engine deletes the oldest
        pages: list[str] = []
        while page := await storage.list_documents(tenant, "f", after=pages[-1] if pages else None, limit=120):
            pages += page
        assert pages == kept

    async def test_a_kept_folder_expires_later_and_never_sooner(self, storage: Storage, tenant: str) -> None:
        for name in ("f", "f/a", "g/a"):
            await put(storage, tenant, name, ttl_seconds=0.3)
        await put(storage, tenant, "f/long", ttl_seconds=500.0)
        await storage.keep_folder(tenant, "f", ttl_seconds=100.0)
        await storage.keep_folder(tenant, "f", ttl_seconds=0.001)
        await storage.keep_folder(tenant, "none", ttl_seconds=100.0)
        while await storage.get_document(tenant, "g/a") is not None:
            await asyncio.sleep(0.01)
        assert await names_of(storage, tenant, ["f", "f/a", "f/long"]) == ["f", "f/a", "f/long"]
        assert await storage.list_documents(tenant, "f", limit=10) == ["f/a", "f/long"]

    async def test_an_expired_document_is_not_kept(self, storage: Storage, tenant: str) -> None:
        await put(storage, tenant, "f/a", ttl_seconds=0.001)
        while await storage.get_document(tenant, "f/a") is not None:
            pass
        await storage.keep_folder(tenant, "f", ttl_seconds=100.0)
        assert await storage.get_document(tenant, "f/a") is None


class TestKeys:
    async def test_put_get_list(self, storage: Storage) -> None:
        assert await storage.list_keys() == []
        second = KeyRecord("b", "dev", "hmac-sha256:00", "2026-11-20T00:00:00Z")
        first = KeyRecord("a", "dev", "hmac-sha256:01", "2026-11-20T00:00:00Z", models=("m",))
        await storage.put_key(second)
        await storage.put_key(first)
        assert await storage.list_keys() == [first, second]
        assert await storage.get_key("a") == first
        assert await storage.get_key("c") is None

    async def test_the_same_id_is_replaced(self, storage: Storage) -> None:
        record = KeyRecord("a", "dev", "hmac-sha256:01", "2026-11-20T00:00:00Z")
        await storage.put_key(record)
        revoked = msgspec.structs.replace(record, revoked=True)
        await storage.put_key(revoked)
        assert await storage.list_keys() == [revoked]


async def test_open_and_close_twice(storage: Storage, tenant: str) -> None:
    await storage.open()
    assert isinstance(await reserve(storage, f"{tenant}/a", slot(tenant)), Grant)
    await storage.close()
    await storage.close()


def test_every_url_scheme_has_its_engine(tmp_path: Path) -> None:
    assert isinstance(open_storage("memory://"), MemoryStorage)
    assert isinstance(open_storage(f"sqlite:///{tmp_path / 'x.db'}"), SqliteStorage)
    for url in "redis://127.0.0.1:1/0", "rediss://127.0.0.1:1", "unix:///run/redis.sock":
        assert isinstance(open_storage(url), RedisStorage)


@pytest.mark.parametrize("url", ["postgres://user:secret@host/db", "memory", "sqlite:state.db", ""])
def test_the_error_for_an_unknown_scheme_lists_the_valid_ones(url: str) -> None:
    with pytest.raises(ValueError, match="memory://, sqlite://, redis://, rediss://, unix://") as raised:
        open_storage(url)
    assert "secret" not in str(raised.value)


def test_sqlite_needs_a_path() -> None:
    with pytest.raises(ValueError, match="needs a path"):
        open_storage("sqlite://state.db")


async def test_force_reserve_takes_charges_beyond_their_limits(storage: Storage) -> None:
    tenant = next(_tenants)
    charges: list[Charge] = [
        RateCharge(f"{tenant}/tokens", 15, 10, 100.0),
        SlotCharge(f"{tenant}/slots", 1),
        SpendCharge(f"{tenant}/budget", 70, 50, 1e6),
    ]
    for name in ("a", "b", "b"):  # a second time changes nothing
        await storage.force_reserve(f"{tenant}/{name}", charges, lease_seconds=LEASE_SECONDS, now=NOW)
    assert await storage.remaining(charges, now=NOW) == (0, 0, 0)
    assert await storage.settle(f"{tenant}/a", [2, 0, 20], now=NOW)
    assert await storage.settle(f"{tenant}/b", [2, 0, 20], now=NOW)
    assert not await storage.settle(f"{tenant}/b", [2, 0, 20], now=NOW)
    assert await storage.remaining(charges, now=NOW) == (6, 1, 10)


async def test_a_forced_reservation_is_a_lease(storage: Storage) -> None:
    tenant = next(_tenants)
    slot_charge = SlotCharge(f"{tenant}/slots", 1)
    await storage.force_reserve(f"{tenant}/a", [slot_charge], lease_seconds=LEASE_SECONDS, now=NOW)
    assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + 20)
    assert await storage.remaining([slot_charge], now=NOW + LEASE_SECONDS) == (0,)
    assert await storage.remaining([slot_charge], now=NOW + 20 + LEASE_SECONDS) == (1,)


async def test_remaining_reserves_nothing(storage: Storage) -> None:
    tenant = next(_tenants)
    charges: list[Charge] = [
        RateCharge(f"{tenant}/tokens", 3, 10, 100.0),
        SlotCharge(f"{tenant}/slots", 2),
        SpendCharge(f"{tenant}/budget", 8, 50, 1e6),
    ]
    assert await storage.remaining(charges, now=NOW) == (10, 2, 50)
    await storage.reserve(f"{tenant}/a", charges, lease_seconds=LEASE_SECONDS, now=NOW)
    for _ in range(2):
        assert await storage.remaining(charges, now=NOW) == (7, 1, 42)
    assert await storage.remaining([], now=NOW) == ()


async def test_a_replica_is_counted_while_it_reports(storage: Storage) -> None:
    assert await storage.count_replicas(alive_seconds=10.0, now=NOW) == 1
    assert await storage.count_replicas(alive_seconds=10.0, now=NOW + 60) == 1


async def test_change_key_compares_the_revision(storage: Storage) -> None:
    first = KeyRecord("contested", "t", "hmac-sha256:00", "2026-11-20T00:00:00Z")
    assert await storage.change_key(first)
    assert not await storage.change_key(first)  # it exists
    revoked = msgspec.structs.replace(first, revoked=True, revision=1)
    rotated = msgspec.structs.replace(first, hash="hmac-sha256:01", revision=1)
    assert await storage.change_key(revoked)
    assert not await storage.change_key(rotated)  # this writer has not seen the revocation
    assert await storage.get_key("contested") == revoked
    limited = msgspec.structs.replace(revoked, limits={"requests": {"amount": 1, "period": 60.0}}, revision=2)
    assert await storage.change_key(limited)
    assert await storage.get_key("contested") == limited


class TestRecords:
    async def test_a_change_compares_the_revision(self, storage: Storage) -> None:
        first = StoredRecord("tenant", "a", "{}")
        assert await storage.change_record(first)
        assert not await storage.change_record(first)
        assert not await storage.change_record(msgspec.structs.replace(first, revision=2))
        assert await storage.change_record(StoredRecord("admin_key", "a", "1"))  # kinds do not share names
        gone = StoredRecord("tenant", "a", None, revision=1)
        assert await storage.change_record(gone)
        assert await storage.change_record(again := StoredRecord("tenant", "a", '{"é": "\\"}', revision=2))
        assert not await storage.change_record(gone)
        found = await storage.records_since("")
        assert found.restarted
        assert found.records == [StoredRecord("admin_key", "a", "1"), again]

    async def test_a_position_shows_only_later_changes(self, storage: Storage) -> None:
        nothing = await storage.records_since("")
        assert nothing.records == []
        for name in "abc":
            await storage.change_record(StoredRecord("tenant", name, name))
        found = await storage.records_since(nothing.position)
        assert [record.name for record in found.records] == ["a", "b", "c"]
        assert await storage.records_since(found.position) == ([], found.position, False)
        await storage.change_record(StoredRecord("tenant", "b", None, revision=1))
        changed, position, restarted = await storage.records_since(found.position)
        assert (changed, restarted) == ([StoredRecord("tenant", "b", None, revision=1)], False)
        assert (await storage.records_since(position)).records == []

    async def test_many_records_are_read_in_pages(self, storage: Storage) -> None:
        count = RECORDS_PER_READ + 5
        added = [storage.change_record(StoredRecord("tenant", str(number), "{}")) for number in range(count)]
        assert all(await asyncio.gather(*added))
        names, position, page = [], "", RECORDS_PER_READ
        while page == RECORDS_PER_READ:
            found, position, _ = await storage.records_since(position)
            page = len(found)
            names += [record.name for record in found]
        assert sorted(names) == sorted(map(str, range(count)))

    async def test_a_position_of_lost_data_starts_again(self, storage: Storage) -> None:
        if not storage.is_shared:
            return  # the memory engine lives as long as its readers
        await storage.change_record(StoredRecord("tenant", "a", "{}"))
        found = await storage.records_since("another:7")
        assert found.restarted
        assert [record.name for record in found.records] == ["a"]


async def messages_after(storage: Storage, after: str) -> tuple[list[bytes], str]:
    """All messages after a position, and the position after them."""
    messages: list[bytes] = []
    while True:
        some, after = await storage.publish_and_read(b"", after)
        if not some:
            return messages, after
        assert len(some) <= PEER_MESSAGES_PER_READ
        messages += some


async def test_peer_messages_are_read_once_and_in_order(storage: Storage) -> None:
    await asyncio.gather(
        *(storage.publish_and_read(b"%d" % number, "") for number in range(PEER_MESSAGES_PER_READ + 3))
    )
    messages, position = await messages_after(storage, "")
    assert messages == ([b"%d" % number for number in range(PEER_MESSAGES_PER_READ + 3)] if storage.is_shared else [])
    assert await storage.publish_and_read(b"", position) == ([], position)
    await storage.publish_and_read(b"later", position)
    assert (await messages_after(storage, position))[0] == ([b"later"] if storage.is_shared else [])


async def test_old_peer_messages_are_deleted(storage: Storage) -> None:
    for _ in range(6):
        await asyncio.gather(*(storage.publish_and_read(b"n", "") for _ in range(PEER_MESSAGES_KEPT // 4)))
    messages, _ = await messages_after(storage, "")
    assert len(messages) <= PEER_MESSAGES_KEPT * 1.11
    assert not storage.is_shared or len(messages) >= PEER_MESSAGES_KEPT


async def test_a_call_that_reserves_zero_may_outlive_its_account(storage: Storage) -> None:
    """It holds nothing, so the account is deleted while the call runs."""
    tenant = next(_tenants)
    free = SpendCharge(f"{tenant}/budget", 0, 50, keep_seconds=10.0)
    await storage.reserve(f"{tenant}/a", [free], lease_seconds=LEASE_SECONDS, now=NOW)
    for seconds in (20.0, 40.0, 60.0):
        assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=NOW + seconds)
    assert await storage.settle(f"{tenant}/a", [5], now=NOW + 80)
    assert await storage.remaining([free], now=NOW + 80) == (45,)


@pytest.mark.parametrize("back_seconds", [60.0, 5 * 3600.0])
async def test_a_rate_refills_after_the_clock_was_set_back(storage: Storage, back_seconds: float) -> None:
    tenant, now = next(_tenants), NOW - back_seconds
    await reserve(storage, f"{tenant}/a", rate(tenant, 60))
    await reserve(storage, f"{tenant}/b", rate(tenant, 40), now=NOW + 10)
    assert await storage.remaining([rate(tenant, 0)], now=now) == (10,)
    assert await storage.settle(f"{tenant}/b", [0], now=now)
    (left,) = await storage.remaining([rate(tenant, 0)], now=now)
    assert 10 <= left <= 50  # how much of it had leaked before is unknown
    assert isinstance(await reserve(storage, f"{tenant}/c", rate(tenant, 10), now=now), Grant)
    assert await storage.remaining([rate(tenant, 0)], now=now + 100) == (100,)


async def test_a_lease_ends_after_the_clock_was_set_back(storage: Storage) -> None:
    tenant, now = next(_tenants), NOW - 5 * 3600
    charges: list[Charge] = [slot(tenant, limit=1), spend(tenant, 60)]
    await reserve(storage, f"{tenant}/a", *charges)
    if isinstance(storage, MemoryStorage):  # whose reservations end with the process, so a live call settles
        assert await storage.settle(f"{tenant}/a", [0, 0], now=now)
    assert await storage.remaining(charges, now=now) == (1, 100)


async def test_an_extended_lease_survives_the_clock_being_set_back(storage: Storage) -> None:
    tenant, now = next(_tenants), NOW - 5 * 3600
    charges: list[Charge] = [slot(tenant, limit=1), spend(tenant, 60)]
    await reserve(storage, f"{tenant}/a", *charges)
    assert await storage.extend_lease(f"{tenant}/a", lease_seconds=LEASE_SECONDS, now=now)
    assert await storage.remaining(charges, now=now + 1) == (0, 40)
    assert await storage.settle(f"{tenant}/a", [0, 7], now=now + 2)
    assert await storage.remaining(charges, now=now + 2) == (1, 93)
