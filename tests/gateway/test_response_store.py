from __future__ import annotations

import pytest

from gateway.core.errors import Overloaded, StorageUnavailable
from gateway.endpoints.exchange import BodyRoom
from gateway.policy import Responses
from gateway.response_store import Archive, Archives
from gateway.storage.base import Document
from gateway.storage.memory import MemoryStorage
from tests.gateway.calls import a_policy

DOCUMENT = Document(b"head", b"body")


class Away(MemoryStorage):
    async def get_document(self, tenant: str, name: str) -> Document | None:
        raise StorageUnavailable("away")


def archive_of(archives: Archives, responses: Responses) -> Archive:
    policy = a_policy().model_copy(update={"responses": responses})
    archive = archives.of(policy.tenants[0], policy)
    assert archive is not None
    return archive


async def test_what_is_kept_is_kept_for_so_long() -> None:
    now = 0.0
    archives = Archives(MemoryStorage(clock=lambda: now), BodyRoom(0))
    archive = archive_of(archives, Responses(keep=60.0))
    assert await archive.put("a", DOCUMENT, call_id="req_1")
    assert await archive.get("a") == DOCUMENT and await archive.heads(["a"]) == [b"head"]
    now = 61.0
    assert await archive.get("a") is None and not await archive.delete("a")


async def test_what_the_storage_has_no_room_for_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    archives = Archives(MemoryStorage(document_bytes=8), BodyRoom(0))
    assert not await archive_of(archives, Responses(keep=60.0)).put("a", DOCUMENT, call_id="req_1")
    assert archives.outcomes["too_large"] == 1 and "no room for 8 bytes" in caplog.text


async def test_a_storage_that_is_away_is_worth_asking_again() -> None:
    archive = archive_of(Archives(Away(), BodyRoom(0)), Responses(keep=60.0))
    with pytest.raises(StorageUnavailable) as caught:
        await archive.get("a")
    assert caught.value.headers["retry-after"] == "1"


async def test_room_is_taken_and_given_back_once() -> None:
    room = BodyRoom(100)
    archive = archive_of(Archives(MemoryStorage(), room), Responses(keep=60.0))
    archive.hold(60)
    archive.hold(40)
    with pytest.raises(Overloaded):
        archive.hold(1)
    assert room.held_bytes == 100
    archive.let_go()
    archive.let_go()
    assert room.held_bytes == 0


async def test_a_tenant_has_no_more_than_the_policy_says() -> None:
    archives = Archives(MemoryStorage(), BodyRoom(0))
    archive = archive_of(archives, Responses(keep=60.0, max_stored_bytes=20))
    for name in "abc":
        assert await archive.put(name, DOCUMENT, call_id="req_1")
    assert [await archive.get(name) for name in "abc"] == [None, DOCUMENT, DOCUMENT]
