"""Conversations by HTTP, and responses that read and extend them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import conversations as sdk
from pydantic import TypeAdapter

from gateway.core.errors import NotFound
from gateway.endpoints.conversations import ConversationsApi
from gateway.endpoints.request_body import BodyBudget
from gateway.endpoints.responses import ResponsesTranslator, conversations
from gateway.endpoints.responses.conversations import Conversation
from gateway.endpoints.responses.stored import StoredTurn
from gateway.policy import Responses
from gateway.prompts.reader import read_fields
from gateway.response_store import ResponseStore
from gateway.storage.memory import MemoryStorage
from tests.gateway.calls import a_policy
from tests.gateway.endpoints.responses.translated import check_response
from tests.gateway.endpoints.stored_routes import OTHER, OTHER_KEY, STORED, call_route, native, send
from tests.gateway.harness import (
    DONE,
    Client,
    Rig,
    a_rig,
    answer,
    delta,
    in_time,
    last_event,
    settle,
    tenant,
    usage_frame,
)
from tests.openai_spec import Validate

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "there"}

_conversation = TypeAdapter(sdk.Conversation)
_item: TypeAdapter[Any] = TypeAdapter(sdk.ConversationItem)


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


async def call(rig: Rig, method: str, path: str, body: Any = None, query: str = "", **options: Any) -> Client:
    return await call_route(rig, ConversationsApi, method, f"/v1/conversations{path}", query, body, **options)


async def done(rig: Rig, method: str, path: str, body: Any = None, query: str = "") -> Any:
    client = await call(rig, method, path, body, query)
    assert client.status == 200, client.content
    return client.json


async def create(rig: Rig, *items: Any, **fields: Any) -> str:
    return str((await done(rig, "POST", "", {"items": list(items), **fields}))["id"])


async def texts(rig: Rig, name: str) -> list[str]:
    page = await done(rig, "GET", f"/{name}/items", query="order=asc&limit=100")
    return ["".join(part["text"] for part in item["content"]) for item in page["data"]]


async def respond(rig: Rig, conversation: Any, input: Any = "hello", **fields: Any) -> Client:
    body = json.dumps({"model": "m", "input": input, "conversation": conversation, **fields}).encode()
    return await rig.ask(Client(body, path="/v1/responses"))


def prompt(rig: Rig) -> list[Any]:
    return [message.get("content") for message in json.loads(bytes(rig.last_call.fields["messages"]))]


async def test_a_conversation_is_created_changed_and_deleted(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        created = await done(rig, "POST", "", {"metadata": {"topic": "x"}})
        validate("ConversationResource", created)
        _conversation.validate_python(created)
        name = created["id"]
        assert created["metadata"] == {"topic": "x"} and await done(rig, "GET", f"/{name}") == created
        changed = await done(rig, "POST", f"/{name}", {"metadata": {"topic": "y"}})
        assert changed == {**created, "metadata": {"topic": "y"}} == await done(rig, "GET", f"/{name}")
        await done(rig, "POST", f"/{name}/items", {"items": [said("one")]})
        deleted = await done(rig, "DELETE", f"/{name}")
        validate("DeletedConversationResource", deleted)
        assert deleted["id"] == name
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/msg_1")):
            assert (await call(rig, method, f"/{name}{path}")).status == 404
        assert await rig.storage.list_documents("conversations/t", name, limit=9) == []


async def test_a_conversation_expires_after_its_last_addition() -> None:
    now = 0.0
    response_store = ResponseStore(MemoryStorage(clock=lambda: now), BodyBudget(0))
    policy = a_policy().model_copy(update={"responses": Responses(keep=60.0)})
    responses = response_store.of(policy.tenants[0], policy)
    assert responses is not None
    conversation = await Conversation.create(responses.conversations, {})
    items = [b'{"type":"message","id":"a"}', b'{"type":"message","id":"b"}']
    for now, item in zip((0.0, 50.0), items, strict=True):  # noqa: B007 - the clock of the storage
        await conversation.add(StoredTurn([item]))
    now = 100.0
    assert await conversation.items() == items, "the first item lives as long as the last one"
    now = 111.0
    with pytest.raises(NotFound):
        await conversation.items()


async def test_an_empty_body_creates_a_conversation(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        assert (await done(rig, "POST", ""))["metadata"] == {}


async def test_items_are_added_listed_shown_and_deleted(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig, said("one"), said("two", "assistant"))
        added = await done(
            rig, "POST", f"/{name}/items", {"items": [CALL, OUTPUT, {**said("three"), "id": "msg_mine"}]}
        )
        page = await done(rig, "GET", f"/{name}/items", query="order=asc")
        for listed in (added, page):
            validate("ConversationItemList", listed)
        for item in page["data"]:
            _item.validate_python(item)
            shown = await done(rig, "GET", f"/{name}/items/{item['id']}")
            assert shown == item
            validate("ConversationItem", shown)
        assert page["data"][2:] == added["data"] and added["data"][2]["id"] == "msg_mine"
        conversation = await done(rig, "DELETE", f"/{name}/items/msg_mine")
        validate("ConversationResource", conversation)
        kinds = [item["type"] for item in (await done(rig, "GET", f"/{name}/items"))["data"]]
        assert kinds == ["function_call_output", "function_call", "message", "message"]
        assert (await call(rig, "DELETE", f"/{name}/items/msg_mine")).status == 404
        for item in page["data"][:4]:
            await done(rig, "DELETE", f"/{name}/items/{item['id']}")
        assert (await done(rig, "GET", f"/{name}/items"))["data"] == []


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_pages_add_up_to_the_whole_list(tmp_path: Path, order: str, limit: int) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig, said("0"), said("1"))
        for number in range(2, 7):
            await done(rig, "POST", f"/{name}/items", {"items": [said(str(number))]})
        seen: list[str] = []
        after, more = "", True
        while more:
            page = await done(rig, "GET", f"/{name}/items", query=f"order={order}&limit={limit}&include=x{after}")
            seen += [item["content"][0]["text"] for item in page["data"]]
            after, more = f"&after={page['last_id']}", page["has_more"]
        assert seen == sorted(map(str, range(7)), reverse=order == "desc")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
async def test_a_response_reads_the_conversation_and_extends_it(
    tmp_path: Path, stream: bool, as_object: bool, validate: Validate
) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig, said("Be brief.", "developer"))
        wanted: Any = {"id": name} if as_object else name
        for turn in range(3):
            rig.script(*((delta(f"a{turn}"), usage_frame(), DONE) if stream else (answer(f"a{turn}"),)))
            client = await respond(rig, wanted, f"q{turn}", stream=stream)
            response = last_event(client)["response"] if stream else client.json
            check_response(validate, response)
            assert response["conversation"] == {"id": name} and response["store"]
        assert prompt(rig) == ["Be brief.", "q0", "a0", "q1", "a1", "q2"]
        assert await texts(rig, name) == ["Be brief.", "q0", "a0", "q1", "a1", "q2", "a2"]
        (output,) = response["output"]
        assert (await done(rig, "GET", f"/{name}/items/{output['id']}"))["content"] == output["content"]


async def test_a_response_that_is_not_stored_extends_its_conversation_too(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        name = await create(rig)
        response = (await respond(rig, name, store=False)).json
        assert not response["store"] and await texts(rig, name) == ["hello", "hi"]


async def test_a_cut_answer_leaves_the_conversation_as_it_was(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(delta("one "), None)
        name = await create(rig, said("before"))
        await respond(rig, name, stream=True)
        assert await texts(rig, name) == ["before"]


async def test_an_answer_is_sent_if_it_cannot_be_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig)
        request = asyncio.create_task(respond(rig, name))
        reply = await rig.reply()
        await done(rig, "DELETE", f"/{name}")
        reply.say(answer("hi"))
        response = (await request).json
        assert response["conversation"] is None and response["status"] == "completed"
        assert "was not added to its conversation" in caplog.text


async def test_concurrent_responses_add_whole_turns(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig)
        requests = []
        for number in range(4):
            requests.append(asyncio.create_task(respond(rig, name, f"q{number}")))
            await rig.reply(number)
        for reply in sorted(rig.replies, key=lambda reply: -reply.number):
            question = json.loads(bytes(reply.call.fields["messages"]))[-1]["content"]
            reply.say(answer(question.replace("q", "a")))
        await asyncio.gather(*requests)
        seen = await texts(rig, name)
        pairs = [*zip(seen[::2], seen[1::2], strict=True)]
        assert sorted(pairs) == [(f"q{number}", f"a{number}") for number in range(4)]


async def test_a_turn_follows_the_turns_that_it_has_read_even_if_the_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig, said("one"))
        rig.script(answer("hi"))
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() - 10**9)
        await respond(rig, name)
        assert await texts(rig, name) == ["one", "hello", "hi"]


async def test_a_conversation_and_a_previous_response_exclude_each_other(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        name = await create(rig)
        response = (await respond(rig, name)).json
        both = await respond(rig, name, previous_response_id=response["id"])
        assert (both.status, both.json["error"]["param"]) == (400, "previous_response_id")
        body = json.dumps({"model": "m", "input": "x", "previous_response_id": response["id"]}).encode()
        previous = await rig.ask(Client(body, path="/v1/responses"))
        assert previous.status == 400 and f"belongs to the conversation {name}" in previous.json["error"]["message"]


@pytest.mark.parametrize("name", ["conv_none", "resp_x", "", "x" * 5000, "conv_a/metadata"])
async def test_an_unknown_conversation_is_404(tmp_path: Path, name: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await respond(rig, name)
        assert (client.status, client.json["error"]["param"]) == (404, "conversation")
        assert len(client.content) < 500


async def test_there_are_none_without_stored_responses(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        assert (await call(rig, "POST", "", {})).status == 404
        client = await respond(rig, "conv_a")
        assert (client.status, client.json["error"]["param"]) == (400, "conversation")


async def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), OTHER]) as rig:
        name = await create(rig, said("one"))
        for method, path in (("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("POST", "/items")):
            body = {"metadata": {}, "items": [said("x")]} if method == "POST" else None
            assert (await call(rig, method, f"/{name}{path}", body, key=OTHER_KEY)).status == 404
        assert await texts(rig, name) == ["one"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [said("x")] * 21}, "items"),
        ("", {"metadata": {"a": 1}}, "metadata[...]"),
        ("", {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ("", {"items": ["x"]}, "items[0]"),
        ("/items", {"items": []}, "items"),
        ("/items", {}, "items"),
        ("/items", {"items": [{"type": "mcp_call"}]}, "items[0].type"),
        ("/items", {"items": [said("x"), {"role": "judge", "content": "x"}]}, "items[1].role"),
    ],
)
async def test_an_invalid_body_is_rejected_by_name(tmp_path: Path, path: str, body: Any, param: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig)
        client = await call(rig, "POST", f"/{name}{path}" if path else "", body)
        assert (client.status, client.json["error"]["param"]) == (400, param)


async def test_items_that_only_a_deployment_knows_are_kept_as_they_are(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, **native("responses")) as rig:
        name = await create(rig, {"type": "mcp_call", "content": 5})
        (item,) = (await done(rig, "GET", f"/{name}/items"))["data"]
        assert (item["type"], item["content"]) == ("mcp_call", 5)
        malformed: list[Any] = [{"type": {}}, {"type": "message", "role": "user"}, {"role": "user", "content": [5]}]
        for wrong in malformed:
            assert (await call(rig, "POST", f"/{name}/items", {"items": [wrong]})).status == 400


async def test_a_body_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, **native("responses")) as rig:
        body = b'{"items": [{"type": "mcp_call", "\xff": 1}, {"type": "message", "role": "user", "content": "\xff"}]}'
        client = await call(rig, "POST", "", [body])
        assert (client.status, client.json["error"]["type"]) == (400, "invalid_request_error")


async def passed(rig: Rig, conversation: str, output: bytes) -> bool:
    """Pass a response of a deployment that has the API through its translator. Returns whether it was stored."""
    policy = rig.components.policies.current
    responses = rig.response_store.of(policy.tenants[0], policy)
    assert responses is not None
    body = json.dumps({"model": "m", "input": "x", "conversation": conversation}).encode()
    translator = ResponsesTranslator("req_1")
    await translator.load_history(body, responses)
    translator.read(read_fields(body), body)
    translator.pass_answer()
    sent = b'{"id":"resp_1","status":"completed","output":%b}' % output
    received, stored = translator.answer(sent), translator.must_store
    assert received + (await translator.store_and_finish() if stored else b"") == sent
    return stored


async def test_items_without_ids_of_a_deployment_get_ids(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig)
        assert await passed(rig, name, b'[{"type":"message","role":"assistant","content":"y"},{"type":"new","id":5}]')
        items = (await done(rig, "GET", f"/{name}/items", query="order=asc"))["data"]
        assert [item["type"] for item in items] == ["message", "message", "new"]
        assert len({item["id"] for item in items}) == 3
        for item in items:
            assert (await done(rig, "GET", f"/{name}/items/{item['id']}")) == item


@pytest.mark.parametrize("output", [b"5", b"null", b"[5]", b"{}", b'"x"'])
async def test_an_answer_of_another_form_passes_and_is_not_stored(tmp_path: Path, output: bytes) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig)
        assert not await passed(rig, name, output)
        assert await texts(rig, name) == []


async def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(tmp_path, responses={"keep": "30d", "max_response_bytes": 1000}) as rig:
        name = await create(rig)
        large = await call(rig, "POST", f"/{name}/items", {"items": [said("x" * 1000)]})
        assert large.status == 413
        monkeypatch.setattr(conversations, "RESPONSES_MAX", 3)
        for number in range(4):
            await done(rig, "POST", f"/{name}/items", {"items": [said(str(number))]})
        full = await respond(rig, name)
        assert (full.status, full.json["error"]["param"]) == (400, "conversation")
        assert "at most 3 turns" in full.json["error"]["message"]
        monkeypatch.setattr(conversations, "RESPONSES_MAX", 1000)
        monkeypatch.setattr(conversations, "HISTORY_BYTES_MAX", 100)
        assert (await respond(rig, name)).status == 400


async def test_a_history_needs_room_among_all_bodies(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig, said("x" * 4000))
        rig.script(answer())
        rig.components.bodies.max_bytes = 3000
        assert (await respond(rig, name)).status == 503
        rig.components.bodies.max_bytes = 9000
        assert (await respond(rig, name)).status == 200


async def test_bodies_that_arrive_share_the_room_of_all_bodies(tmp_path: Path) -> None:
    """A client that sends slowly holds memory, which is free again when it leaves."""
    async with a_rig(tmp_path, responses=STORED) as rig:
        room = rig.response_store.room
        slow = Client([b"x" * 1000, b"x" * 500, None], path="/v1/conversations")
        api = ConversationsApi(rig.components.authenticator, rig.components.policies, rig.response_store)
        sending = asyncio.create_task(send(api, slow))
        await settle()
        assert room.held_bytes == 1500
        room.max_bytes = 1600
        refused = await call(rig, "POST", "", [b"y" * 50, b"y" * 100])
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        slow.leave()
        await in_time(sending)
        assert room.held_bytes == 0
        assert await create(rig)


async def test_a_storage_without_room_loses_the_whole_conversation(tmp_path: Path) -> None:
    """Its record is its oldest document, so it is deleted before any turn: no prompt has a gap."""
    async with a_rig(tmp_path, responses={"keep": "30d", "max_stored_bytes": 1200}) as rig:
        name = await create(rig, said("x" * 300))
        for _ in range(2):
            await done(rig, "POST", f"/{name}/items", {"items": [said("y" * 300)]})
        await call(rig, "POST", f"/{name}/items", {"items": [said("z" * 300)]})
        assert (await call(rig, "GET", f"/{name}")).status == 404


async def test_an_unavailable_storage_is_503_and_not_404(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        name = await create(rig)
        rig.storage.documents_away = True
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/items")):
            client = await call(rig, method, f"/{name}{path}")
            assert (client.status, client.headers["retry-after"]) == (503, "1")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3)),
        st.tuples(st.just("respond"), st.just(1)),
        st.tuples(st.just("delete"), st.integers(0, 5)),
    ),
    max_size=8,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=steps)
async def test_any_history_is_a_list_of_items(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]]
) -> None:
    """The conversation equals a list to which items are added and from which they are deleted."""
    async with a_rig(tmp_path_factory.mktemp("history"), responses=STORED) as rig:
        name, model = await create(rig), list[str]()
        for number, (kind, amount) in enumerate(history):
            if kind == "add":
                new = [f"{number}.{each}" for each in range(amount)]
                await done(rig, "POST", f"/{name}/items", {"items": [said(text) for text in new]})
                model += new
            elif kind == "respond":
                rig.script(answer(f"{number}!"))
                await respond(rig, name, f"{number}?")
                assert prompt(rig) == [*model, f"{number}?"]
                model += [f"{number}?", f"{number}!"]
            elif amount < len(model):
                page = await done(rig, "GET", f"/{name}/items", query="order=asc&limit=100")
                await done(rig, "DELETE", f"/{name}/items/{page['data'][amount]['id']}")
                del model[amount]
            assert await texts(rig, name) == model
