"""The contract of the storage ports, run over every engine: API keys, records and peer messages."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.storage.base import (
    PEER_MESSAGES_KEPT,
    PEER_MESSAGES_PER_READ,
    RECORDS_PER_READ,
    KeyRecord,
    Storage,
    StoredRecord,
)


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
