"""The contract of the storage ports, run over every engine: blobs, documents and folders."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.storage.base import DELETE_BATCH_SIZE, Document, Storage
from gateway.storage.redis import RedisStorage


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
