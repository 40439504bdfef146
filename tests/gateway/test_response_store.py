from __future__ import annotations

import pytest

from gateway.core.errors import Overloaded, StorageUnavailable
from gateway.endpoints.request_body import BodyBudget
from gateway.policy import Responses
from gateway.response_store import ResponseStore, TenantResponses
from gateway.storage.base import Document
from gateway.storage.memory import MemoryStorage
from tests.gateway.calls import a_policy

DOCUMENT = Document(b"head", b"body")


class Away(MemoryStorage):
    async def get_document(self, tenant: str, name: str) -> Document | None:
        raise StorageUnavailable("away")


def archive_of(response_store: ResponseStore, responses: Responses) -> TenantResponses:
    policy = a_policy().model_copy(update={"responses": responses})
    archive = response_store.of(policy.tenants[0], policy)
    assert archive is not None
    return archive


async def test_what_is_kept_is_kept_for_so_long() -> None:
    now = 0.0
    response_store = ResponseStore(MemoryStorage(clock=lambda: now), BodyBudget(0))
    responses = archive_of(response_store, Responses(keep=60.0))
    assert await responses.put("a", DOCUMENT, call_id="req_1")
    assert await responses.get("a") == DOCUMENT and await responses.heads(["a"]) == [b"head"]
    now = 61.0
    assert await responses.get("a") is None and not await responses.delete("a")


async def test_what_the_storage_has_no_room_for_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    response_store = ResponseStore(MemoryStorage(document_bytes=8), BodyBudget(0))
    assert not await archive_of(response_store, Responses(keep=60.0)).put("a", DOCUMENT, call_id="req_1")
    assert response_store.outcomes["too_large"] == 1 and "no room for 8 bytes" in caplog.text


async def test_a_storage_that_is_away_is_worth_asking_again() -> None:
    responses = archive_of(ResponseStore(Away(), BodyBudget(0)), Responses(keep=60.0))
    with pytest.raises(StorageUnavailable) as caught:
        await responses.get("a")
    assert caught.value.headers["retry-after"] == "1"


async def test_room_is_taken_and_given_back_once() -> None:
    room = BodyBudget(100)
    responses = archive_of(ResponseStore(MemoryStorage(), room), Responses(keep=60.0))
    responses.hold(60)
    responses.hold(40)
    with pytest.raises(Overloaded):
        responses.hold(1)
    assert room.held_bytes == 100
    responses.release()
    responses.release()
    assert room.held_bytes == 0


async def test_a_tenant_has_no_more_than_the_policy_says() -> None:
    response_store = ResponseStore(MemoryStorage(), BodyBudget(0))
    responses = archive_of(response_store, Responses(keep=60.0, max_stored_bytes=20))
    for name in "abc":
        assert await responses.put(name, DOCUMENT, call_id="req_1")
    assert [await responses.get(name) for name in "abc"] == [None, DOCUMENT, DOCUMENT]
