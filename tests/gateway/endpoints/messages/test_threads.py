"""Threads by Anthropic's unmodified SDK, in front of scripted deployments, and what is stored of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import beta_async_tool

from gateway.endpoints.messages import threads
from gateway.endpoints.messages.folding import FoldedMessage
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.response_store import ResponseStore
from tests.gateway.endpoints.stored_routes import OTHER, OTHER_KEY, STORED, native
from tests.gateway.harness import (
    DONE,
    KEY,
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
from tests.gateway.providers.wires import (
    MESSAGE_STOP,
    block_delta,
    block_start,
    block_stop,
    event,
    message,
    message_delta,
    message_start,
)

SENT: list[dict[str, Any]] = []  # the bodies that the SDK sent in one test
END = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}).encode()


class RigTransport(httpx2.AsyncBaseTransport):
    """Sends an SDK's requests to a rig."""

    def __init__(self, rig: Rig, key: str) -> None:
        self._rig = rig
        self._key = key

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        SENT.append(json.loads(body))
        headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() != b"authorization"]
        client = await self._rig.ask(Client(body, key=self._key, path=request.url.path, headers=headers))
        return httpx2.Response(client.status, headers=client.headers, content=client.content, request=request)


@asynccontextmanager
async def sdk_of(rig: Rig, key: str = KEY) -> AsyncIterator[anthropic.AsyncAnthropic]:
    SENT.clear()
    transport = httpx2.AsyncClient(transport=RigTransport(rig, key))
    async with anthropic.AsyncAnthropic(
        base_url="http://gateway", api_key=key, http_client=transport, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def says(rig: Rig, text: str, *, stream: bool = False) -> None:
    if stream:
        rig.script(delta(text[:2], model="m"), delta(text[2:]), b"data: " + END + b"\n\n", usage_frame(), DONE)
    else:
        rig.script(answer(text, model="m"))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def prompt(rig: Rig) -> list[tuple[str, Any]]:
    """The messages of the last call that was sent upstream."""
    messages = json.loads(bytes(rig.last_call.fields["messages"]))
    return [(message["role"], message.get("content")) for message in messages]


async def ask(rig: Rig, thread: Any, *messages: Any, key: str = KEY, **fields: Any) -> Client:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages), "thread": thread, **fields}
    return await rig.ask(Client(json.dumps(body).encode(), key=key, path="/v1/messages"))


async def create(rig: Rig, text: str = "one", **fields: Any) -> str:
    says(rig, "1")
    client = await ask(rig, {"type": "create"}, user(text), **fields)
    assert client.status == 200, client.content
    return str(client.json["id"])


def continuing(name: str) -> dict[str, str]:
    return {"type": "continue", "previous_message_id": name}


def code_of(client: Client) -> tuple[int, str]:
    return client.status, client.json["error"]["details"]["error_code"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_sends_only_new_messages_and_the_model_sees_all(tmp_path: Path, stream: bool) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig, sdk_of(rig) as client:
        thread = client.beta.messages.thread(model="m", max_tokens=9, system="Be brief.")

        async def turn(text: str) -> anthropic.types.beta.BetaMessage:
            if not stream:
                return await thread.send(user(text))
            async with thread.stream(user(text)) as events:
                return await events.get_final_message()

        for number, text in enumerate(("one", "two", "three")):
            says(rig, f"answer {number}", stream=stream)
            reply = await turn(text)
            assert [block.to_dict()["text"] for block in reply.content] == [f"answer {number}"]
            assert thread.previous_message_id == reply.id
        assert [(body["thread"]["type"], len(body["messages"]), "system" in body) for body in SENT] == [
            ("create", 1, True), ("continue", 1, False), ("continue", 1, False),
        ]  # fmt: skip
        assert prompt(rig) == [
            ("system", "Be brief."), ("user", "one"), ("assistant", "answer 0"), ("user", "two"),
            ("assistant", "answer 1"), ("user", "three"),
        ]  # fmt: skip
        receipts = rig.receipts()
        assert [receipt["outcome"] for receipt in receipts] == ["complete"] * 3, "metered like any call"
        assert len({receipt["call_id"] for receipt in receipts}) == 3


async def test_a_tool_runner_continues_its_thread(tmp_path: Path) -> None:
    @beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        return f"Sun in {city}"

    async with a_rig(tmp_path, responses=STORED) as rig, sdk_of(rig) as client:
        function = {"name": "weather", "arguments": '{"city":"Rome"}'}
        call = {"id": "call_1", "type": "function", "function": function}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [call]}}
        says(rig, "It is sunny.")
        sunny = rig.servers["a"].script
        rig.script(json.dumps({"model": "m", "choices": [choice]}).encode())
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=9, messages=[user("Weather in Rome?")], tools=[weather]
        )
        texts = []
        async for message in runner:
            rig.script(*sunny)
            texts += [block.text for block in message.content if block.type == "text"]
        assert texts == ["It is sunny."]
        assert [body["thread"]["type"] for body in SENT] == ["create", "continue"]
        assert len(SENT[1]["messages"]) == 1 and "tools" not in SENT[1]
        call_fields = rig.last_call.fields
        assert json.loads(bytes(call_fields["tools"]))[0]["function"]["name"] == "weather"
        messages = json.loads(bytes(call_fields["messages"]))
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Rome"}'
        assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "Sun in Rome"}


async def test_each_message_is_continued_once(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        first = await create(rig)
        assert (await ask(rig, continuing(first), user("two"))).status == 200
        assert code_of(await ask(rig, continuing(first), user("other"))) == (400, "thread_already_continued")


async def test_a_continuation_in_flight_excludes_others_at_every_gateway(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        first = await create(rig)
        rig.script()
        body = {"model": "m", "max_tokens": 9, "messages": [user("two")], "thread": continuing(first)}
        slow = Client(json.dumps(body).encode(), path="/v1/messages")
        task = rig.begin(slow)
        reply = await rig.reply(1)
        here, elsewhere = rig.components, another_gateway(rig)
        for components in (here, elsewhere):
            rig.components = components
            assert code_of(await ask(rig, continuing(first), user("x"))) == (400, "thread_continue_in_flight")
        rig.components = here
        reply.say(answer("2", model="m"))
        await in_time(task)
        assert slow.status == 200
        rig.components = elsewhere
        says(rig, "3")
        assert (await ask(rig, continuing(slow.json["id"]), user("three"))).status == 200
        assert [content for _, content in prompt(rig)] == ["one", "1", "two", "2", "three"]
        rig.components = here


def another_gateway(rig: Rig) -> Any:
    """The components of another gateway on the same storage."""
    store = ResponseStore(rig.storage, rig.components.bodies)
    return dataclasses.replace(rig.components, canonicaliser=Canonicaliser(b"secret", response_store=store))


async def fails(rig: Rig, first: str) -> None:
    rig.script(cut())
    assert (await ask(rig, continuing(first), user("two"))).status == 502


async def is_cut(rig: Rig, first: str) -> None:
    rig.script(delta("par", model="m"), cut())
    client = await ask(rig, continuing(first), user("two"), stream=True)
    assert b"event: error" in client.content and b"message_stop" not in client.content


async def disconnects(rig: Rig, first: str) -> None:
    rig.script(delta("par", model="m"))
    opened = len(rig.replies)
    body = {"model": "m", "max_tokens": 9, "messages": [user("two")], "thread": continuing(first), "stream": True}
    client = Client(json.dumps(body).encode(), path="/v1/messages")
    task = rig.begin(client)
    await rig.reply(opened)
    await in_time(client.first_bytes.wait())
    client.leave()
    await in_time(task)


@pytest.mark.parametrize("end", [fails, is_cut, disconnects])
async def test_a_request_that_fails_leaves_the_thread_as_it_was(
    tmp_path: Path, end: Callable[[Rig, str], Awaitable[None]]
) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        first = await create(rig)
        await end(rig, first)
        await settle()
        says(rig, "2")
        assert (await ask(rig, continuing(first), user("again"))).status == 200
        assert [content for _, content in prompt(rig)] == ["one", "1", "again"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_the_answer_can_continue_it(tmp_path: Path, stream: bool) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        says(rig, "hello", stream=stream)
        body = {"model": "m", "max_tokens": 9, "messages": [user("x")], "thread": {"type": "create"}, "stream": stream}
        client = Client(json.dumps(body).encode(), path="/v1/messages")
        stored: list[int] = []

        def note() -> None:
            stored.append(rig.response_store.outcomes["kept"])

        client.on_last = note
        await rig.ask(client)
        assert (client.status, stored) == (200, [1])


@pytest.mark.parametrize("name", ["msg_x", "", "a/b", "x" * 101])
async def test_a_message_that_is_not_stored_is_not_found(tmp_path: Path, name: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        client = await ask(rig, continuing(name), user("two"))
        assert code_of(client) == (404, "thread_not_found")
        assert client.json["error"]["details"]["param"] == "thread.previous_message_id"


async def test_threads_belong_to_their_tenant(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, tenants=[tenant(), OTHER]) as rig:
        first = await create(rig)
        assert code_of(await ask(rig, continuing(first), user("x"), key=OTHER_KEY)) == (404, "thread_not_found")
        assert (await ask(rig, continuing(first), user("x"))).status == 200


async def test_the_sdk_replays_a_thread_of_which_a_part_is_lost(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig, sdk_of(rig) as client:
        thread = client.beta.messages.thread(model="m", max_tokens=9, system="Be brief.")
        says(rig, "1")
        first = await thread.send(user("one"))
        await thread.send(user("two"))
        assert await rig.storage.delete_document("threads/t", first.id)
        await thread.send(user("three"))
        assert [body["thread"]["type"] for body in SENT] == ["create", "continue", "continue", "create"]
        assert [content for _, content in prompt(rig)] == ["Be brief.", "one", "1", "two", "1", "three"]
        await thread.send(user("four"))
        assert SENT[-1]["thread"]["type"] == "continue", "the new thread is continued"


async def test_system_and_tools_are_those_of_the_thread(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        first = await create(rig, system="Be brief.")
        changed = await ask(rig, continuing(first), user("two"), system="Be long.", tools=[{"name": "f"}])
        assert code_of(changed) == (400, "thread_fingerprint_mismatch")
        assert changed.json["error"]["message"].startswith("system: system and tools differ")
        repeated = await ask(rig, continuing(first), user("two"), system="Be brief.")
        assert repeated.status == 400 and repeated.json["error"]["details"] == {"param": "system"}
        assert (await ask(rig, continuing(first), user("two"), system=None, tools=[])).status == 200
        assert prompt(rig)[0] == ("system", "Be brief.")


@pytest.mark.parametrize("field", ["context_management", "fallbacks", "compaction"])
async def test_fields_that_threads_do_not_support_are_named(tmp_path: Path, field: str) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        unsupported: dict[str, Any] = {field: {"edits": [1]}}
        client = await ask(rig, {"type": "create"}, user("x"), **unsupported)
        assert code_of(client) == (400, "thread_unsupported_request")
        assert client.json["error"]["details"]["unsupported"] == [field]


async def test_a_policy_that_stores_nothing_makes_the_sdk_send_everything(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig, sdk_of(rig) as client:
        thread = client.beta.messages.thread(
            model="m", max_tokens=9, unsupported_request_behavior="continue_unthreaded"
        )
        for text in ("one", "two"):
            says(rig, "1")
            await thread.send(user(text))
        assert ["thread" in body for body in SENT] == [True, False, False]
        assert [content for _, content in prompt(rig)] == ["one", "1", "two"]


async def test_threads_are_bounded_in_time_bytes_and_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig(tmp_path, responses={**STORED, "max_response_bytes": 400}) as rig:
        long = await create(rig, "x" * 500)
        assert code_of(await ask(rig, continuing(long), user("two"))) == (404, "thread_not_found")
        assert rig.response_store.outcomes["too_large"] == 1
        short = await create(rig)
        monkeypatch.setattr(threads, "HISTORY_BYTES_MAX", 10)
        assert code_of(await ask(rig, continuing(short), user("two"))) == (404, "thread_not_found")
        monkeypatch.undo()
        monkeypatch.setattr(threads, "TURNS_MAX", 0)
        assert code_of(await ask(rig, continuing(short), user("two"))) == (404, "thread_not_found")


async def test_a_history_needs_room_among_all_bodies(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        first = await create(rig, "x" * 4000)
        rig.components.bodies.max_bytes = 3000
        assert (await ask(rig, continuing(first), user("two"))).status == 529
        rig.components.bodies.max_bytes = 9000
        assert (await ask(rig, continuing(first), user("two"))).status == 200


async def test_a_storage_that_is_away_is_no_lost_thread(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED) as rig:
        first = await create(rig)
        rig.storage.documents_away = True
        assert (await ask(rig, continuing(first), user("two"))).status == 503
        assert (await ask(rig, {"type": "create"}, user("x"))).status == 200, "the answer is sent all the same"
        rig.storage.documents_away = False
        assert (await ask(rig, continuing(first), user("two"))).status == 200


async def test_old_cache_breakpoints_are_not_repeated(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, **native("messages")) as rig:
        marked = {"cache_control": {"type": "ephemeral"}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r", **marked}]}
        reply = message([{"type": "text", "text": "a"}], id="msg_up")
        passes(rig, json.dumps(reply).encode())
        given = {"role": "user", "content": [{**result, **marked}, {"type": "text", "text": "cache_control", **marked}]}
        assert (await ask(rig, {"type": "create"}, given, beta_field=1)).content == json.dumps(reply).encode()
        new = {"role": "user", "content": [{"type": "text", "text": "two", **marked}]}
        assert (await ask(rig, continuing("msg_up"), new, beta_field=1)).status == 200
        sent = rig.last_call.native
        assert sent is not None and "thread" not in sent.fields
        messages = json.loads(bytes(sent.fields["messages"]))
        plain = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}
        assert messages == [
            {"role": "user", "content": [plain, {"type": "text", "text": "cache_control"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            new,
        ]


async def test_a_stream_of_the_vendor_passes_unchanged_and_is_stored(tmp_path: Path) -> None:
    async with a_rig(tmp_path, responses=STORED, **native("messages")) as rig:
        frames = (
            message_start(),
            block_start(0, type="thinking", thinking="", signature=""),
            block_delta(0, type="thinking_delta", thinking="t"),
            block_delta(0, type="signature_delta", signature="sig") + block_stop(0),
            block_start(1, type="server_tool_use", id="s", name="web_search", input={}),
            block_delta(1, type="input_json_delta", partial_json='{"q": '),
            block_delta(1, type="input_json_delta", partial_json="1}") + block_stop(1),
            message_delta("end_turn") + MESSAGE_STOP,
        )  # fmt: skip
        passes(rig, *frames)
        client = await ask(rig, {"type": "create"}, user("one"), stream=True, unknown=1)
        assert client.content == b"".join(frames)
        name = json.loads(frames[0].split(b"data: ")[1])["message"]["id"]
        assert (await ask(rig, continuing(name), user("two"), stream=True, unknown=1)).status == 200
        sent = rig.last_call.native
        assert sent is not None
        assert json.loads(bytes(sent.fields["messages"]))[1]["content"] == [
            {"type": "thinking", "thinking": "t", "signature": "sig"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": 1}},
        ]


def passes(rig: Rig, *words: bytes) -> None:
    """Let the deployment answer in the client's format."""
    server = rig.servers["a"]
    server.script = words
    opened = server.open

    async def open_native(*arguments: Any, **options: Any) -> Any:
        reply = await opened(*arguments, **options)
        reply.api = "messages"
        return reply

    server.open = open_native  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "frames",
    [
        b"data: {}\n\n",
        block_delta(0, type="text_delta", text="a"),
        message_start() + block_start(1, type="text", text=""),
        message_start() + block_start(0, type="text", text="") + block_delta(0, type="new_delta"),
        message_start() + block_start(0, type="tool_use", input={})
        + block_delta(0, type="input_json_delta", partial_json="{") + block_stop(0),
        event(type="message_start", message=[]),
        b"data: x\n\n",
    ],
)  # fmt: skip
def test_events_that_make_no_message_are_not_stored(frames: bytes) -> None:
    message = FoldedMessage(10_000)
    message.read(frames)
    message.read(MESSAGE_STOP)
    assert not message.is_complete and message.content == []


def test_a_message_above_its_bound_is_not_kept() -> None:
    message = FoldedMessage(300)
    message.read(message_start() + block_start(0, type="text", text=""))
    message.read(block_delta(0, type="text_delta", text="a" * 300))
    assert not message.is_readable and message.content == []
