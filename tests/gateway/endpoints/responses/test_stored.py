"""Stored responses through the whole gateway: what is stored, and continuing from it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.api_keys import hash_key
from gateway.endpoints import COUNTING_ENDPOINTS
from gateway.endpoints.request_body import BodyBudget
from gateway.endpoints.responses import stored as stored_module
from gateway.endpoints.responses.stored import MAX_ID_CHARACTERS
from gateway.response_store import ResponseStore
from gateway.serve import handle
from gateway.storage.memory import MemoryStorage
from gateway.token_counting import TokenCounting
from tests.gateway.endpoints.responses.translated import TOOL, events_of
from tests.gateway.harness import (
    DONE,
    KEY,
    MAX_BODY_BYTES,
    PEPPER,
    Client,
    Rig,
    a_rig,
    answer,
    cut,
    delta,
    in_time,
    settle,
    tenant,
    usage_frame,
)

STORED = {"keep": "30d"}
OTHER_KEY = "wp-other-0123456789abcdef"


def client_of(input: Any = "hello", key: str = KEY, **fields: Any) -> Client:
    body = json.dumps({"model": "m", "input": input, **fields}).encode()
    return Client(body, path="/v1/responses", key=key)


async def respond(rig: Rig, input: Any = "hello", **fields: Any) -> Any:
    """Return the response, whether or not it was streamed."""
    client = await rig.ask(client_of(input, **fields))
    assert client.status == 200 and client.whole, client.content
    return events_of(client.content)[-1]["response"] if fields.get("stream") else client.json


def message_of(message: dict[str, Any], *, stream: bool) -> tuple[bytes, ...]:
    """Return the chunks of a deployment that answers with this message."""
    if not stream:
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": "stop"}
        return (json.dumps({"model": "served", "choices": [choice]}).encode(),)
    choice = {"index": 0, "delta": message, "finish_reason": "stop"}
    return (b"data: " + json.dumps({"model": "served", "choices": [choice]}).encode() + b"\n\n", DONE)


def prompt_of(rig: Rig) -> tuple[bytes, bytes, tuple[int, ...]]:
    """Return the prompt of the last upstream request: messages, tools and fingerprint."""
    call = rig.last_call
    return bytes(call.fields["messages"]), bytes(call.fields.get("tools", b"")), call.fingerprint


@pytest.mark.parametrize("stream", [False, True])
async def test_continuing_a_response_equals_sending_the_conversation_by_hand(tmp_path: Path, stream: bool) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        message = {"reasoning_content": "Hm.", "content": "Let me look.", "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ]}  # fmt: skip
        rig.script(*message_of(message, stream=stream))
        first = await respond(rig, "Where?", tools=[TOOL], instructions="Be brief.", stream=stream)
        assert first["store"] and first["previous_response_id"] is None
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
        rig.script(*message_of({"content": "There."}, stream=stream))
        output = {"type": "function_call_output", "call_id": "call_1", "output": "there"}
        second = await respond(rig, [output], tools=[TOOL], previous_response_id=first["id"], stream=stream)
        assert second["previous_response_id"] == first["id"]
        by_id = prompt_of(rig)
        by_hand = [{"role": "user", "content": "Where?"}, *first["output"], output]
        await respond(rig, by_hand, tools=[TOOL], store=False, stream=stream)
        assert prompt_of(rig) == by_id
        messages = json.loads(by_id[0])
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"], (
            "instructions are not part of the history"
        )
        third = await respond(rig, "And then?", previous_response_id=second["id"], instructions="New.", stream=stream)
        by_id = prompt_of(rig)
        by_hand += [*second["output"], {"role": "user", "content": "And then?"}]
        await respond(rig, by_hand, instructions="New.", store=False, stream=stream)
        assert prompt_of(rig) == by_id and third["instructions"] == "New."


async def test_a_response_is_stored_before_its_end_is_sent(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        may_store = asyncio.Event()
        put = rig.storage.put_document

        async def slow(*given: Any, **named: Any) -> bool:
            await may_store.wait()
            return await put(*given, **named)

        rig.storage.put_document = slow  # type: ignore[method-assign]
        for stream in (False, True):
            may_store.clear()
            words = (delta("hi"), usage_frame(), DONE) if stream else (answer("hi"),)
            rig.script(*words)
            client = client_of(stream=stream)
            serving = rig.begin(client)
            await settle()
            assert rig.receipts(), "billed before it is stored"
            assert (client.whole, b"response.completed" in client.content) == (False, False)
            may_store.set()
            await in_time(serving)
            response = events_of(client.content)[-1]["response"] if stream else client.json
            assert client.whole and response["store"]
            assert await rig.storage.get_document("t", response["id"]) is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unavailable_storage_does_not_fail_the_answer(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(*message_of({"content": "hi"}, stream=stream))
        rig.storage.documents_away = True
        response = await respond(rig, stream=stream)
        assert response["status"] == "completed" and not response["store"]
        assert rig.response_store.outcomes == {"kept": 0, "too_large": 0, "storage_away": 1}
        assert "a response was not stored: the storage is away" in caplog.text
        client = await rig.ask(client_of(previous_response_id=response["id"]))
        assert (client.status, client.json["error"]["code"]) == (503, "storage_unavailable")
        assert client.headers["retry-after"] == "1" and client.headers["x-should-retry"] == "true"
        rig.storage.documents_away = False
        client = await rig.ask(client_of(previous_response_id=response["id"]))
        assert (client.status, client.json["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_response_that_is_too_large_is_sent_but_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with a_rig(tmp_path, responses={**STORED, "max_response_bytes": 2000}) as rig:
        rig.script(answer("hi"))
        assert (await respond(rig, "x" * 3000))["store"] is False
        assert (await respond(rig, "x"))["store"] is True
        assert rig.response_store.outcomes == {"kept": 1, "too_large": 1, "storage_away": 0}
        (line,) = [record for record in caplog.records if "a response was not stored" in record.message]
        assert "the limit is 2000" in line.message and "xxx" not in line.message


async def test_store_false_stores_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        first = await respond(rig, "one")
        second = await respond(rig, "two", store=False, previous_response_id=first["id"])
        assert (first["store"], second["store"]) == (True, False)
        assert len(json.loads(prompt_of(rig)[0])) == 3, "it can continue a stored one"
        assert await rig.storage.get_document("t", second["id"]) is None
        assert rig.response_store.outcomes["kept"] == 1


@pytest.mark.parametrize("responses", [None, {"keep": "off"}])
async def test_nothing_is_stored_without_a_policy(tmp_path: Path, responses: Any) -> None:
    async with a_rig(tmp_path, **({} if responses is None else {"responses": responses})) as rig:
        rig.script(answer("hi"))
        response = await respond(rig, store=True)
        assert not response["store"] and await rig.storage.get_document("t", response["id"]) is None
        client = await rig.ask(client_of(previous_response_id=response["id"]))
        assert (client.status, client.json["error"]["param"]) == (400, "previous_response_id")
        assert "`responses: {keep: 30d}`" in client.json["error"]["message"]


async def test_a_tenant_may_have_its_own_setting(tmp_path: Path) -> None:
    other = {
        "name": "other", "keys": [{"id": "other", "hash": hash_key(OTHER_KEY, PEPPER)}], "responses": {"keep": "off"}
    }  # fmt: skip
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), other]) as rig:
        rig.script(answer("hi"))
        assert (await respond(rig))["store"] and not (await respond(rig, key=OTHER_KEY))["store"]


async def test_another_tenants_response_cannot_be_continued(tmp_path: Path) -> None:
    other = {"name": "other", "keys": [{"id": "other", "hash": hash_key(OTHER_KEY, PEPPER)}]}
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), other]) as rig:
        rig.script(answer("hi"))
        response = await respond(rig)
        none = f"resp_{'0' * 24}"
        theirs, unknown = [
            await rig.ask(client_of(previous_response_id=name, key=OTHER_KEY)) for name in (response["id"], none)
        ]
        assert (theirs.status, theirs.json["error"]["code"]) == (400, "previous_response_not_found")
        assert theirs.content.replace(response["id"].encode(), none.encode()) == unknown.content


async def test_incomplete_responses_are_stored_and_failed_ones_are_not(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(json.dumps({"choices": [{"message": {"content": "half"}, "finish_reason": "length"}]}).encode())
        response = await respond(rig)
        assert (response["status"], response["store"]) == ("incomplete", True)
        rig.script(delta("one"), cut())
        client = await rig.ask(client_of(stream=True))
        events = events_of(client.content)
        assert events[0]["response"]["store"], "as intended at that time"
        assert (events[-1]["type"], events[-1]["response"]["store"]) == ("response.failed", False)
        assert await rig.storage.get_document("t", events[-1]["response"]["id"]) is None


async def test_nothing_is_stored_if_the_client_disconnects(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = client_of(stream=True)
        serving = rig.begin(client)
        (await rig.reply()).say(delta("one"))
        await settle()
        client.leave()
        await in_time(asyncio.wait([serving]))
        assert rig.response_store.outcomes == {"kept": 0, "too_large": 0, "storage_away": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_calls_that_share_an_answer_is_stored(tmp_path: Path, stream: bool) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        clients = [client_of(temperature=0, stream=stream) for _ in range(3)]
        serving = [rig.begin(client) for client in clients]
        reply = await rig.reply()
        await settle()
        clients[0].leave()  # the call that the others share
        await settle()
        for word in (delta("one"), DONE) if stream else (answer("one"),):
            reply.say(word)
        await in_time(asyncio.wait(serving))
        answers = [events_of(each.content)[-1]["response"] if stream else each.json for each in clients[1:]]
        ids = [response["id"] for response in answers]
        assert len(rig.replies) == 1 and rig.response_store.outcomes["kept"] == 2
        assert len(set(ids)) == 2 and None not in await rig.storage.get_heads("t", ids)


async def test_signed_thinking_is_stored_even_if_the_client_did_not_get_it(tmp_path: Path) -> None:
    signed = {"type": "thinking", "thinking": "Hm.", "signature": "s1g"}
    message = {"content": "So.", "reasoning_content": "Hm.", "thinking_blocks": [signed]}
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(*message_of(message, stream=False))
        response = await respond(rig)
        assert "encrypted_content" not in response["output"][0]
        await respond(rig, "Continue.", previous_response_id=response["id"])
        assert json.loads(prompt_of(rig)[0])[1]["thinking_blocks"] == [signed]


@pytest.mark.parametrize("name", ["resp_" + "0" * 24, "", "x" * (MAX_ID_CHARACTERS + 1), "résp", "\x00", "../t"])
async def test_an_unknown_previous_response_is_not_found(tmp_path: Path, name: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await rig.ask(client_of(previous_response_id=name))
        assert (client.status, client.json["error"]["code"]) == (400, "previous_response_not_found")
        assert client.json["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"previous_response_id": 5}, "Expected `str | null`"),
        ({"conversation": 5}, "Expected `str | object | null`"),
        ({"background": "yes"}, "Expected `bool | null`"),
        ({"input": [], "previous_response_id": None}, "at least one item"),
    ],
)
async def test_rejections_give_a_hint(tmp_path: Path, fields: Any, hint: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await rig.ask(client_of(**fields))
        assert client.status == 400 and hint in client.json["error"]["message"]


@pytest.mark.parametrize("body", [b'{"previous_response_id":"\\udc00"}', b"[]", b"{", b'{"input":"\xff"}', b""])
async def test_an_invalid_body_is_rejected_before_references_are_loaded(tmp_path: Path, body: bytes) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        assert (await rig.ask(Client(body, path="/v1/responses"))).status == 400


async def test_a_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "RESPONSES_MAX", 3)
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        response = await respond(rig)
        for _ in range(3):
            response = await respond(rig, previous_response_id=response["id"])
        client = await rig.ask(client_of(previous_response_id=response["id"]))
        assert client.status == 400 and "at most 3 responses" in client.json["error"]["message"]
        monkeypatch.setattr(stored_module, "RESPONSES_MAX", 9)
        monkeypatch.setattr(stored_module, "HISTORY_BYTES_MAX", 500)
        client = await rig.ask(client_of(previous_response_id=response["id"]))
        assert client.status == 400 and "500 bytes" in client.json["error"]["message"]


async def test_a_history_counts_against_the_body_budget(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        response = await respond(rig, "x" * (MAX_BODY_BYTES // 2))
        rig.script()
        serving = rig.begin(client_of(previous_response_id=response["id"]))
        reply = await rig.reply(1)
        assert rig.components.bodies.held_bytes > MAX_BODY_BYTES // 2
        rig.components.bodies.max_bytes = MAX_BODY_BYTES
        client = await rig.ask(client_of(previous_response_id=response["id"]))
        assert (client.status, client.json["error"]["code"]) == (503, "overloaded")
        reply.say(answer("hi"))
        await in_time(serving)
        assert rig.components.bodies.held_bytes == 0


async def test_a_history_with_a_deleted_response_is_not_found(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        first = await respond(rig)
        second = await respond(rig, previous_response_id=first["id"])
        third = await respond(rig, previous_response_id=second["id"])
        await rig.storage.delete_document("t", first["id"])
        client = await rig.ask(client_of(previous_response_id=third["id"]))
        assert (client.status, client.json["error"]["code"]) == (400, "previous_response_not_found")
        assert first["id"] in client.json["error"]["message"]


async def test_token_counting_loads_the_history_and_stores_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer("hi"))
        first = await respond(rig)
        rig.servers["a"].prompt_tokens = 42
        endpoint = next(endpoint for endpoint in COUNTING_ENDPOINTS if endpoint.path == "responses/input_tokens")
        client, story = client_of(previous_response_id=first["id"]), TokenCounting(rig.fleet).count
        await in_time(handle(rig.components, endpoint, client.scope, client.receive, client.send, story=story))
        assert client.json == {"object": "response.input_tokens", "input_tokens": 42}
        assert rig.response_store.outcomes["kept"] == 1


class Model:
    """The expected state: each response's parent and own turn."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.turns: dict[str, list[Any]] = {}
        self.deleted = set[str]()

    def add(self, name: str, parent: str | None, turn: list[Any]) -> None:
        self.parents[name], self.turns[name] = parent, turn

    def history(self, name: str | None) -> list[Any] | None:
        """Return all turns up to a response, or None if one of them was deleted."""
        if name is None:
            return []
        earlier = self.history(self.parents[name])
        return None if earlier is None or name in self.deleted else earlier + self.turns[name]


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
CALL = {"index": 0, "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
MESSAGES = st.fixed_dictionaries(
    {"content": TEXTS},
    optional={"reasoning_content": TEXTS, "tool_calls": st.just([{**CALL, "id": "call_1"}])},
)
INPUTS = st.one_of(
    TEXTS,
    st.lists(
        st.one_of(
            st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
            st.builds(lambda text: {"role": "developer", "content": [{"type": "input_text", "text": text}]}, TEXTS),
            st.builds(lambda text: {"type": "function_call_output", "call_id": "call_1", "output": text}, TEXTS),
            st.builds(lambda text: {"type": "message", "role": "assistant", "content": text, "id": "mine"}, TEXTS),
        ),
        min_size=1,
        max_size=3,
    ),
)
# The number says how many responses are newer: mostly the newest is continued, and one before it deleted.
RESPOND = st.tuples(st.just("respond"), st.sampled_from([0, 0, 0, 1, 2, 3]), INPUTS, MESSAGES, st.booleans())
DELETE = st.tuples(st.just("delete"), st.integers(1, 3))
STEPS = st.lists(st.one_of(RESPOND, RESPOND, DELETE), min_size=4, max_size=14)


@given(steps=STEPS)
@settings(max_examples=60)
async def test_any_tree_of_responses_behaves_like_a_simple_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    async with a_rig(tmp_path_factory.mktemp("rig"), responses=STORED) as rig:
        model = Model()
        for step, which, *more in steps:
            names = [*model.parents]
            if step == "delete":
                if names:
                    name = names[-1 - which % len(names)]
                    assert await rig.storage.delete_document("t", name) == (name not in model.deleted)
                    model.deleted.add(name)
                continue
            input, message, stream = more
            parent = (None, *names)[-1 - which % (len(names) + 1)]
            rig.script(*message_of(message, stream=stream))
            history = model.history(parent)
            if history is None:
                client = await rig.ask(client_of(input, previous_response_id=parent, stream=stream))
                assert (client.status, client.json["error"]["code"]) == (400, "previous_response_not_found")
                continue
            response = await respond(rig, input, previous_response_id=parent, stream=stream)
            by_id = prompt_of(rig)
            own = [{"role": "user", "content": input}] if isinstance(input, str) else input
            await respond(rig, [*history, *own], store=False, stream=stream)
            assert prompt_of(rig) == by_id
            model.add(response["id"], parent, [*own, *response["output"]])


async def test_a_tenant_without_storage_has_no_store(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant()]) as rig:
        policy = rig.components.policies.current
        response_store = ResponseStore(MemoryStorage(), BodyBudget(1))
        assert response_store.of(policy.tenants[0], policy) is None
