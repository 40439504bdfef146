"""The last uses of keys: written in batches, bounded, kept over an outage of the storage."""

from __future__ import annotations

import asyncio

import pytest

from gateway.auth import last_uses
from gateway.auth.last_uses import LastUses
from gateway.core.errors import StorageUnavailable
from gateway.storage.base import Document
from gateway.storage.memory import MemoryStorage


class CountingStorage(MemoryStorage):
    """Counts the writes, and fails while it is `away`."""

    writes = 0
    away = False

    async def put_document(
        self, tenant: str, name: str, document: Document, *, ttl_seconds: float, max_bytes: int
    ) -> bool:
        if self.away:
            raise StorageUnavailable("away")
        self.writes += 1
        return await super().put_document(tenant, name, document, ttl_seconds=ttl_seconds, max_bytes=max_bytes)


async def test_one_write_a_key_however_often_it_was_used() -> None:
    storage, taken = CountingStorage(owner="me"), [{"a": 1, "b": 2}, {"a": 9}]
    uses = LastUses(storage, lambda: taken.pop(0) if taken else {})
    await uses.write()
    assert storage.writes == 2
    await uses.write()
    await uses.write()
    assert storage.writes == 3
    assert await LastUses(storage, dict).of(["a", "b", "c"]) == {"a": 9, "b": 2}, "any gateway reads them"


async def test_uses_wait_for_the_storage() -> None:
    storage, taken = CountingStorage(owner="me"), [{"a": 1}]
    uses = LastUses(storage, lambda: taken.pop(0) if taken else {})
    storage.away = True
    with pytest.raises(StorageUnavailable):
        await uses.write()
    storage.away = False
    assert await uses.of(["a"]) == {"a": 1}, "shown before it is written"
    await uses.write()
    assert await LastUses(storage, dict).of(["a"]) == {"a": 1}


async def test_a_write_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_uses, "KEYS_PER_WRITE", 10)
    storage, taken = CountingStorage(owner="me"), [{f"k{i}": i + 1 for i in range(25)}]
    uses = LastUses(storage, lambda: taken.pop(0) if taken else {})
    await uses.write()
    assert storage.writes == 10
    for _ in range(2):
        await uses.write()
    assert len(await LastUses(storage, dict).of([f"k{i}" for i in range(25)])) == 25


async def test_the_last_uses_are_written_at_the_end() -> None:
    storage, taken = CountingStorage(owner="me"), [{"a": 1}]
    running = asyncio.create_task(LastUses(storage, lambda: taken.pop(0) if taken else {}).run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert storage.writes == 1
