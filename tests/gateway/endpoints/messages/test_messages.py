"""Anthropic's wire through the whole gateway, with scripted deployments that speak chat (`tests.gateway.harness`)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.providers.base import Fault, ProviderFailure
from tests.gateway.harness import DONE, Client, a_rig, answer, chat, cut, delta, in_time, tenant, usage_frame

PATH = "/v1/messages"
HELLO = {"role": "user", "content": "hello"}
FINISH = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'


def message(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, "messages": [HELLO], **fields}).encode()


def client_of(body: bytes, **more: Any) -> Client:
    return Client(body, path=PATH, **more)


def events(client: Client) -> list[Any]:
    return [json.loads(line[6:]) for line in client.content.splitlines() if line.startswith(b"data: ")]


def names(client: Client) -> list[str]:
    return [line[7:].decode() for line in client.content.splitlines() if line.startswith(b"event: ")]


def text(client: Client) -> str:
    return "".join(e["delta"]["text"] for e in events(client) if e["type"] == "content_block_delta")


async def test_a_message_is_a_call_like_any_other(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer("hi"))
        client = await rig.ask(client_of(message(system="be brief", metadata={"user_id": "u"})))
        assert (client.status, client.headers["content-type"]) == (200, "application/json")
        assert client.json["content"] == [{"type": "text", "text": "hi"}]
        assert (client.json["usage"]["input_tokens"], client.json["usage"]["output_tokens"]) == (10, 2)
        (receipt,) = rig.receipts()
        assert client.headers["request-id"] == client.headers["x-request-id"] == receipt["call_id"]
        assert (receipt["operation"], receipt["end_user"], receipt["outcome"]) == ("chat/completions", "u", "complete")
        assert (receipt["input_uncached"], receipt["output"], receipt["exact"]) == (10, 2, True)
        sent = rig.replies[0].call
        assert (sent.stream, sent.max_output_tokens) == (False, 9)
        assert json.loads(bytes(sent.fields["messages"])) == [{"role": "system", "content": "be brief"}, HELLO]


async def test_a_stream_is_sent_event_by_event(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = client_of(message(stream=True))
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("one"))
        await in_time(client.first_bytes.wait())
        assert names(client) == ["message_start", "content_block_start", "content_block_delta"]
        reply.say(b": ping\n\n", delta(" two") + FINISH, usage_frame(10, 2) + DONE)
        await in_time(serving)
        assert names(client)[3:] == [
            "ping",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert text(client) == "one two" and client.whole
        assert events(client)[-2]["usage"]["input_tokens"] == 10
        assert client.headers["content-type"].startswith("text/event-stream")
        assert rig.receipts()[0]["output"] == 2


@pytest.mark.parametrize("fault", [cut(), None, b'data: {"error": {"message": "out of memory"}}\n\n'])
async def test_a_cut_stream_ends_with_an_error_event(tmp_path: Path, fault: Any) -> None:
    async with a_rig(tmp_path) as rig:
        client = client_of(message(stream=True))
        serving = rig.begin(client)
        (await rig.reply()).say(delta("one") + FINISH, fault)
        await in_time(serving)
        assert names(client) == ["message_start", "content_block_start", "content_block_delta", "error"]
        error = events(client)[-1]
        assert (error["type"], error["error"]["type"]) == ("error", "api_error")
        assert error["request_id"] == client.headers["request-id"]
        assert rig.receipts()[0]["outcome"] == "upstream_cut"


async def test_an_answer_that_cannot_be_translated_is_an_error(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(b'{"choices": [{"message": {"content": 7}}]}')
        whole = await rig.ask(client_of(message()))
        assert (whole.status, whole.json["error"]["type"]) == (502, "api_error")
        rig.script(delta("one"), b'data: {"choices": [{"delta": {"content": 7}}]}\n\n', DONE)
        stream = await rig.ask(client_of(message(stream=True)))
        assert names(stream)[-1] == "error" and "message_stop" not in names(stream)
        rig.script(delta("one"), FINISH.replace(b"stop", b"abort") + DONE)
        stream = await rig.ask(client_of(message(stream=True)))
        assert names(stream)[-1] == "error" and stream.whole


@pytest.mark.parametrize(
    ("client", "status", "kind"),
    [
        (client_of(b"{"), 400, "invalid_request_error"),
        (client_of(b"[]"), 400, "invalid_request_error"),
        (client_of(message(max_tokens=None)), 400, "invalid_request_error"),
        (client_of(message(model="none")), 404, "not_found_error"),
        (client_of(message(), key="wp-dev-wrong"), 401, "authentication_error"),
        (client_of(message(system="x" * 20_000)), 413, "request_too_large"),
    ],
)
async def test_rejected_requests_get_anthropics_error_format(
    tmp_path: Path, client: Client, status: int, kind: str
) -> None:
    async with a_rig(tmp_path) as rig:
        await rig.ask(client)
        assert (client.status, client.json["type"], client.json["error"]["type"]) == (status, "error", kind)
        assert client.json["request_id"] == client.headers["request-id"]
        assert client.headers["x-should-retry"] == "false"
        assert not rig.replies


async def test_a_rate_limit_has_a_retry_after(tmp_path: Path) -> None:
    async with a_rig(tmp_path, tenants=[tenant(requests="1/1h")]) as rig:
        rig.script(answer())
        await rig.ask(client_of(message()))
        limited = await rig.ask(client_of(message()))
        assert (limited.status, limited.json["error"]["type"]) == (429, "rate_limit_error")
        assert float(limited.headers["retry-after"]) > 0 and limited.headers["x-should-retry"] == "true"


async def test_busy_deployments_are_an_overloaded_error(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(ProviderFailure(Fault.STATUS, "busy", status=503))
        client = await rig.ask(client_of(message()))
        assert (client.status, client.json["error"]["type"]) == (529, "overloaded_error")
        assert {a["deployment"] for a in client.json["error"]["details"]["attempts"]} == {"a", "b", "c"}


async def test_an_engines_rejection_is_passed_on(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(ProviderFailure(Fault.REFUSED, "no", status=400, body=b'{"error": {"message": "too long"}}'))
        client = await rig.ask(client_of(message()))
        assert client.status == 400 and client.json["error"]["message"] == "too long"


async def test_a_cached_answer_is_translated_for_each_endpoint(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        rig.script(answer("hi"))
        first = await rig.ask(client_of(message(temperature=0)))
        again = await rig.ask(client_of(message(temperature=0)))
        by_chat = await rig.ask(chat(temperature=0, max_tokens=9))
        assert len(rig.replies) == 1 and by_chat.content == answer("hi")
        assert again.headers["x-warmpath-cache"] == by_chat.headers["x-warmpath-cache"] == "hit"
        assert {**again.json, "id": ""} == {**first.json, "id": ""} and again.json["id"] != first.json["id"]
        rig.script(delta("hi"), FINISH, usage_frame(), DONE)
        await rig.ask(chat(temperature=0, max_tokens=9, stream=True))
        streamed = await rig.ask(client_of(message(temperature=0, stream=True)))
        assert streamed.headers["x-warmpath-cache"] == "hit" and text(streamed) == "hi"
        assert names(streamed)[-1] == "message_stop" and events(streamed)[-2]["usage"]["output_tokens"] == 2


async def test_a_client_that_disconnects_pays_for_what_was_generated(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        client = client_of(message(stream=True))
        serving = rig.begin(client)
        reply = await rig.reply()
        reply.say(delta("one"), delta("two"))
        await in_time(client.first_bytes.wait())
        while len(client.chunks) < 2:
            await asyncio.sleep(0)
        client.leave()
        await in_time(serving)
        (receipt,) = rig.receipts()
        assert (receipt["outcome"], receipt["output"], reply.closed) == ("client_gone", 2, 1)


async def test_equal_prompts_of_both_endpoints_share_a_prefix(tmp_path: Path) -> None:
    system = "You are a careful assistant. " * 200
    turns = [{"role": "system", "content": system}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    async with a_rig(tmp_path) as rig:
        rig.script(answer())
        by_chat = await rig.ask(chat(messages=turns))
        for _ in range(4):
            by_message = await rig.ask(client_of(message(system=[{"type": "text", "text": system}])))
            assert by_message.headers["x-warmpath-deployment"] == by_chat.headers["x-warmpath-deployment"]
        (chain,) = {reply.call.fingerprint for reply in rig.replies}
        assert chain
