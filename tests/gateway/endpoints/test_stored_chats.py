"""Stored chat completions: what is stored, and the routes that read, change and delete it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from pydantic import TypeAdapter

from gateway.endpoints import stored_chats_api
from gateway.endpoints.chat_folding import fold_chat
from gateway.endpoints.stored_chats_api import StoredChatsApi
from tests.gateway.endpoints.stored_routes import OTHER, OTHER_KEY, STORED, call_route, native
from tests.gateway.harness import (
    DONE,
    Client,
    Rig,
    a_rig,
    answer,
    chat,
    counted,
    delta,
    tenant,
    usage_frame,
)
from tests.openai_spec import Validate

COMMON: dict[str, Any] = {
    "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_800_000_000, "model": "served",
}  # fmt: skip

_completion = TypeAdapter(ChatCompletion)


async def call(rig: Rig, method: str, path: str = "", query: str = "", body: Any = None, **options: Any) -> Client:
    return await call_route(rig, StoredChatsApi, method, f"/v1/chat/completions{path}", query, body, **options)


async def done(rig: Rig, method: str, path: str = "", query: str = "", body: Any = None) -> Any:
    client = await call(rig, method, path, query, body)
    assert client.status == 200, client.content
    return client.json


async def store(rig: Rig, name: str, text: str = "hi", **fields: Any) -> Client:
    rig.script(answer(text, **{**COMMON, "id": name, "object": "chat.completion"}))
    client = await rig.ask(chat(store=True, **fields))
    assert client.status == 200, client.content
    return client


async def test_a_stored_completion_equals_the_one_that_was_sent(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        sent = (await store(rig, "chatcmpl-1", metadata={"topic": "x"})).json
        stored = await done(rig, "GET", "/chatcmpl-1")
        validate("CreateChatCompletionResponse", stored)
        _completion.validate_python(stored)
        assert stored["choices"][0]["message"]["content"] == sent["choices"][0]["message"]["content"] == "hi"
        assert (stored["usage"], stored["metadata"]) == (sent["usage"], {"topic": "x"})
        fields = rig.last_call.fields
        assert "store" not in fields and "metadata" in fields, "the deployment stores nothing"
        assert len(rig.receipts()) == 1


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_is_stored_as_a_whole(tmp_path: Path, include_usage: bool, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        end = json.dumps({**COMMON, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}).encode()
        frames = (delta("one ", **COMMON), delta("two", **COMMON), b"data: " + end + b"\n\n", usage_frame(), DONE)
        rig.script(*frames)
        client = await rig.ask(chat(store=True, stream=True, stream_options={"include_usage": include_usage}))
        expected = frames if include_usage else (*frames[:3], DONE)
        assert client.content == b"".join(expected), "the stream passes unchanged"
        stored = await done(rig, "GET", "/chatcmpl-1")
        validate("CreateChatCompletionResponse", stored)
        (choice,) = stored["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "length")
        assert stored.get("usage") == (counted() if include_usage else None)


async def test_lists_are_filtered_and_in_order(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        for number in range(6):
            await store(rig, f"chatcmpl-{number}", str(number), metadata={"odd": str(number % 2), "n": str(number)})
        page = await done(rig, "GET")
        validate("ChatCompletionList", page)
        names = [f"chatcmpl-{number}" for number in range(6)]
        assert [each["id"] for each in page["data"]] == names and not page["has_more"]
        for query, expected in (
            ("order=desc", names[::-1]),
            ("metadata%5Bodd%5D=1", names[1::2]),
            ("metadata%5Bodd%5D=1&metadata%5Bn%5D=3", names[3:4]),
            ("model=m&order=desc&limit=2", names[:3:-1]),
            ("model=served", names),
            ("model=none", []),
            ("after=chatcmpl-3", names[4:]),
            ("after=chatcmpl-3&order=desc", names[2::-1]),
            ("after=chatcmpl-0&limit=1&metadata%5Bodd%5D=0", names[2:3]),
        ):
            page = await done(rig, "GET", query=query)
            assert [each["id"] for each in page["data"]] == expected, query
            assert (page["first_id"], page["last_id"]) == ((expected[0], expected[-1]) if expected else ("", ""))


async def test_metadata_is_replaced_and_a_completion_deleted(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        for name in ("a", "b"):
            await store(rig, name, metadata={"topic": name})
        changed = await done(rig, "POST", "/a", body={"metadata": {"topic": "new"}})
        validate("CreateChatCompletionResponse", changed)
        assert changed["metadata"] == {"topic": "new"} and await done(rig, "GET", "/a") == changed
        listed = await done(rig, "GET", query="metadata%5Btopic%5D=new")
        assert [each["id"] for each in listed["data"]] == ["a"]
        assert [each["id"] for each in (await done(rig, "GET"))["data"]] == ["a", "b"], "a change keeps the order"
        deleted = await done(rig, "DELETE", "/a")
        validate("ChatCompletionDeleted", deleted)
        for method, path, body in (("GET", "/a", None), ("DELETE", "/a", None), ("GET", "/a/messages", None),
                                   ("POST", "/a", {"metadata": {}})):  # fmt: skip
            assert (await call(rig, method, path, body=body)).status == 404
        assert [each["id"] for each in (await done(rig, "GET"))["data"]] == ["b"]
        assert len(await rig.storage.list_documents("chats/t", "index", limit=9)) == 1


async def test_messages_are_listed(tmp_path: Path, validate: Validate) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Look."}, image]},
            {"role": "assistant", "content": "I look."},
        ]
        await store(rig, "a", messages=messages)
        page = await done(rig, "GET", "/a/messages")
        assert [message["id"] for message in page["data"]] == ["a-0", "a-1", "a-2"]
        assert [message["content"] for message in page["data"]] == ["Be brief.", "Look.", "I look."]
        assert page["data"][1]["content_parts"] == messages[1]["content"]
        # The description knows the role `assistant` only.
        alike = [{**message, "role": "assistant"} for message in page["data"]]
        validate("ChatCompletionMessageList", {**page, "data": alike})
        for query, expected in (("order=desc&limit=2", [2, 1]), ("after=a-0", [1, 2]), ("after=a-1&order=desc", [0])):
            page = await done(rig, "GET", "/a/messages", query)
            assert [message["id"] for message in page["data"]] == [f"a-{number}" for number in expected]


@pytest.mark.parametrize("fields", [{}, {"store": False}, {"store": None}])
async def test_other_chats_are_not_stored(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(answer(**COMMON))
        await rig.ask(chat(**fields))
        assert (await done(rig, "GET"))["data"] == []
        assert fields.keys() <= rig.last_call.fields.keys()


async def test_a_response_that_only_passes_is_no_chat(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, **native("responses")) as rig:
        rig.script(answer(**COMMON))
        body = json.dumps({"model": "m", "input": "x", "truncation": "auto", "store": True}).encode()
        await rig.ask(Client(body, path="/v1/responses"))
        assert not rig.last_call.stored and "store" in rig.last_call.fields


async def test_the_policy_may_store_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer(**COMMON))
        await rig.ask(chat(store=True))
        assert "store" in rig.last_call.fields, "the deployment decides"
        assert (await call(rig, "GET")).status == 404


async def test_a_cut_stream_is_not_stored(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        rig.script(delta("one", **COMMON), None)
        await rig.ask(chat(store=True, stream=True))
        assert (await done(rig, "GET"))["data"] == []


async def test_an_answer_that_cannot_be_stored_is_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with a_rig(tmp_path, responses={"keep": "30d", "max_response_bytes": 1000}) as rig:
        assert (await store(rig, "large", "x" * 2000)).json["choices"]
        rig.script(answer("no id"))
        assert (await rig.ask(chat(store=True))).status == 200
        assert (await done(rig, "GET"))["data"] == []
        rig.storage.documents_away = True
        assert (await store(rig, "lost")).status == 200
        assert caplog.text.count("a chat completion was not stored") == 3
        client = await call(rig, "GET", "/lost")
        assert (client.status, client.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    "choices",
    ['["x"]', "5", '{"a":1}', '[{"delta":"x"}]', '[{"index":[1],"delta":{}}]', '[{"index":0},{"index":"x"}]',
     '[{"delta":{"tool_calls":[{"index":0},{"index":"x"}],"content":5}},{"index":"x","delta":{}}]',
     "[" * 2000 + "]" * 2000],
)  # fmt: skip
async def test_a_stream_of_another_form_passes_and_is_not_stored(tmp_path: Path, choices: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        frames = b'data: {"id":"a","choices":%b}\n\n' % choices.encode(), DONE
        rig.script(*frames)
        client = await rig.ask(chat(store=True, stream=True))
        assert client.content == b"".join(frames) and client.whole
        assert rig.response_store.outcomes["too_large"] == 1


async def test_an_answer_of_another_form_passes_and_is_not_stored(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        sent = b'{"id":"a","choices":[{"message":{"tool_calls":[5]}}]}'
        rig.script(sent)
        client = await rig.ask(chat(store=True))
        assert (client.status, client.content) == (200, sent)
        assert (await done(rig, "GET"))["data"] == []


async def test_invalid_metadata_is_rejected(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await rig.ask(chat(store=True, metadata={"a": 1}))
        assert client.status == 400 and not rig.replies
        await store(rig, "a")
        for body in ({}, {"metadata": {"a": 1}}, {"metadata": {"x" * 65: ""}}):
            assert (await call(rig, "POST", "/a", body=body)).status == 400


async def test_any_json_of_a_deployment_can_be_read_again(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        deep: Any = []
        for _ in range(300):
            deep = [deep]
        rig.script(answer("hi", id="a", model="served", large=2**70, deep=deep))
        assert (await rig.ask(chat(store=True))).status == 200
        stored = await done(rig, "GET", "/a")
        assert (stored["large"], stored["deep"]) == (2**70, deep)


async def test_a_cached_answer_is_listed_once(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        for _ in range(2):
            await store(rig, "a", temperature=0)
        assert len(rig.replies) == 1 and [each["id"] for each in (await done(rig, "GET"))["data"]] == ["a"]


async def test_a_completion_that_the_storage_lost_is_not_listed(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        for name in ("a", "b"):
            await store(rig, name)
        await rig.storage.delete_document("chats/t", "a")
        assert [each["id"] for each in (await done(rig, "GET"))["data"]] == ["b"]


async def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), OTHER]) as rig:
        await store(rig, "a")
        for method, path in (("GET", "/a"), ("DELETE", "/a"), ("POST", "/a"), ("GET", "/a/messages")):
            body: Any = {"metadata": {}} if method == "POST" else None
            assert (await call(rig, method, path, body=body, key=OTHER_KEY)).status == 404
        assert (await call(rig, "GET", key=OTHER_KEY)).json["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("order=up", "order"), ("after=none", "after"), ("before=x", "before"),
     (f"after={'x' * 200}", "after")],
)  # fmt: skip
async def test_invalid_parameters_are_rejected_by_name(tmp_path: Path, query: str, param: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await call(rig, "GET", query=query)
        assert (client.status, client.json["error"]["param"]) == (400, param)


async def test_a_list_reads_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_chats_api, "ENTRIES_AT_ONCE", 2)
    monkeypatch.setattr(stored_chats_api, "ENTRIES_MAX", 4)
    monkeypatch.setattr(stored_chats_api, "PAGE_BYTES_MAX", 1)
    async with a_rig(tmp_path, responses=STORED) as rig:
        for number in range(5):
            await store(rig, f"{number}")
        client = await call(rig, "GET", query="model=none")
        assert (client.status, client.json["error"]["param"]) == (400, "after")
        page = await done(rig, "GET")
        assert [each["id"] for each in page["data"]] == ["0"] and page["has_more"], "a page of many bytes ends sooner"


def test_pieces_of_tool_calls_and_logprobs_are_joined() -> None:
    def chunk(delta: Any, **choice: Any) -> bytes:
        return (
            b"data: " + json.dumps({**COMMON, "choices": [{"index": 0, "delta": delta, **choice}]}).encode() + b"\n\n"
        )

    def piece(index: int, arguments: str, **more: Any) -> Any:
        function = {"arguments": arguments, **({"name": "look"} if more else {})}
        return {"tool_calls": [{"index": index, **more, "function": function}]}

    given = [
        chunk({"role": "assistant", "content": None}),
        chunk(piece(0, "", id="c0", type="function")),
        chunk(piece(0, '{"a"')),
        chunk(piece(1, "{}", id="c1", type="function")),
        chunk(piece(0, ":1}")),
        chunk({"role": "assistant", "content": "x"}, logprobs={"content": [{"token": "x"}]}),
        chunk({"content": "y"}, logprobs={"content": [{"token": "y"}]}),
        chunk({}, finish_reason="tool_calls"),
        DONE,
    ]
    (choice,) = fold_chat(given)["choices"]
    message = choice["message"]
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [("c0", "look", '{"a":1}'), ("c1", "look", "{}")]
    assert (message["role"], message["content"], choice["finish_reason"]) == ("assistant", "xy", "tool_calls")
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["x", "y"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    history=st.lists(
        st.tuples(st.sampled_from(["store", "change", "delete"]), st.integers(0, 4), st.sampled_from("xy")), max_size=10
    )
)
async def test_any_history_equals_an_ordered_dictionary(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, str]]
) -> None:
    """In the order in which they were first stored, whatever is changed and deleted."""
    async with a_rig(tmp_path_factory.mktemp("history"), responses=STORED) as rig:
        model: dict[str, str] = {}
        for kind, number, topic in history:
            name = f"chat {number}"
            if kind == "store":
                await store(rig, name, metadata={"topic": topic})
                model[name] = topic
            elif kind == "change":
                client = await call(rig, "POST", f"/{name}", body={"metadata": {"topic": topic}})
                assert client.status == (200 if name in model else 404)
                model |= {name: topic} if name in model else {}
            else:
                assert (await call(rig, "DELETE", f"/{name}")).status == (200 if model.pop(name, None) else 404)
            for wanted in ("", "x", "y"):
                page = await done(rig, "GET", query=f"metadata%5Btopic%5D={wanted}" if wanted else "")
                expected = [each for each, has in model.items() if wanted in ("", has)]
                assert [each["id"] for each in page["data"]] == expected
