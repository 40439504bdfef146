"""Anthropic's messages and OpenAI's responses pass unchanged to deployments that have these APIs, by real SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.faults.upstreams import Request, Upstreams, listening
from tests.e2e.processes import PATIENCE_SECONDS, PRICE, Gateway, gateway, key, simple_policy, tenant
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.gateway.providers.wires import event, message, message_delta

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PRICES = {**PRICE, "search": "0.01"}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
CITATION = {
    "type": "web_search_result_location",
    "url": "https://x",
    "title": "X",
    "encrypted_index": "e",
    "cited_text": "é",
}
CONTENT: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
    {"type": "text", "text": "Sunny.", "citations": [CITATION]},
]
COUNTS = {
    "input_tokens": 90_000, "cache_read_input_tokens": 10_000, "output_tokens": 7,
    "server_tool_use": {"web_search_requests": 3}, "new_count": 1,
}  # fmt: skip
MESSAGE = json.dumps(message(CONTENT, COUNTS, container=None), ensure_ascii=False, indent=1).encode()
STREAM = b"".join(
    [
        event(type="message_start", message=message([], {**COUNTS, "output_tokens": 1}, stop_reason=None)),
        b"event: ping\ndata: {\"type\": \"ping\"}\n\n",
        event(type="content_block_start", index=0, content_block={"type": "text", "text": "", "citations": []}),
        event(type="content_block_delta", index=0, delta={"type": "citations_delta", "citation": CITATION}),
        event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": "Sunny."}),
        event(type="content_block_stop", index=0),
        message_delta(output_tokens=7),
        event(type="message_stop"),
    ]
)  # fmt: skip
OVERLOADED = event(type="error", error={"type": "overloaded_error", "message": "busy"})


async def claude(request: Request) -> None:
    """Anthropic's API. The first word of the prompt says how it fails."""
    word = str(request.body.get("messages", ""))
    if request.path == "/v1/messages/count_tokens":
        await request.write(json_response(b'{"input_tokens": 41}'))
    elif "refuse" in word:
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": "messages: no"}}
        await request.write(json_response(json.dumps(error).encode(), "400 Bad Request"))
    elif "overloaded" in word:
        await request.write(STREAM_HEAD + chunked(STREAM[: STREAM.index(b"event: ping")] + OVERLOADED) + STREAM_END)
    elif "cut" in word:
        await request.write(STREAM_HEAD + chunked(STREAM[: STREAM.index(b"event: content_block_stop")]) + STREAM_END)
    elif request.streams:
        await request.write(STREAM_HEAD + chunked(STREAM[:300]) + chunked(STREAM[300:]) + STREAM_END)
    else:
        await request.write(json_response(MESSAGE))


def response(number: int, output: list[Any], status: str, **more: Any) -> dict[str, Any]:
    """A response as OpenAI's API sends it."""
    counts = {
        "input_tokens": 50, "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0}, "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 55,
    }  # fmt: skip
    return {
        "id": f"resp_upstream{number}", "object": "response", "created_at": 1, "status": status, "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {}, "model": "theirs", "output": output,
        "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0,
        "usage": counts if status == "completed" else None, "text": {"format": {"type": "text"}}, **more,
    }  # fmt: skip


def text_item(number: int) -> dict[str, Any]:
    part = {"type": "output_text", "text": "Sunny.", "annotations": [], "logprobs": []}
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


async def gpt(request: Request) -> None:
    """OpenAI's Responses API."""
    if request.path == "/v1/responses/input_tokens":
        await request.write(json_response(b'{"object": "response.input_tokens", "input_tokens": 43}'))
        return
    number, asked = request.number, str(request.body.get("input"))
    item = text_item(number)
    whole = response(number, [item], "completed", new_field=[1])
    if not request.streams:
        await request.write(json_response(json.dumps(whole).encode()))
        return
    begun = response(number, [], "in_progress")
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.web_search_call.searching", "output_index": 0, "item_id": "ws_1"},
        {"type": "response.output_item.added", "output_index": 0,
         "item": {**item, "content": [], "status": "in_progress"}},
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "item_id": item["id"],
         "delta": "Sunny.", "logprobs": []},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]  # fmt: skip
    frames = [event(**one, sequence_number=at) for at, one in enumerate(events)]
    sent = frames[:5] if "cut" in asked else frames
    await request.write(STREAM_HEAD + chunked(b"".join(sent)) + STREAM_END)


async def chats(request: Request) -> None:
    await request.whole()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Upstreams]]:
    with listening({"claude": claude, "gpt": gpt, "chats": chats}) as upstreams:
        urls = {name: f"http://127.0.0.1:{port}/v1" for name, port in upstreams.ports.items()}
        of: dict[str, Any] = {"model": "theirs", "price": PRICES}
        deployments = [
            {"name": "claude", "provider": "anthropic", "base_url": urls["claude"], **of,
             "headers": {"anthropic-beta": "ours-1"}},
            {"name": "translated", "provider": "anthropic", "base_url": urls["claude"], **of, "native": []},
            {"name": "gpt", "base_url": urls["gpt"], "native": ["responses"], **of},
            {"name": "chats", "base_url": urls["chats"], **of},
        ]  # fmt: skip
        models: list[dict[str, Any]] = [
            {"name": "m", "aliases": ["claude"], "deployments": ["claude"]},
            {"name": "translated", "deployments": ["translated"]},
            {"name": "gpt", "deployments": ["gpt"]},
            {"name": "mixed", "deployments": ["chats", "claude"]},
            {"name": "fallback", "deployments": ["claude"], "fallbacks": ["chat"]},
            {"name": "chat", "deployments": ["chats"]},
        ]
        policy = simple_policy(
            "http://unused", deployments=deployments, models=models, responses={"keep": "1h"},
            tenants=[tenant("dev"), tenant("capped", limits={"cap_output": "max_tokens", "default_output_tokens": 77})],
        )  # fmt: skip
        with gateway(tmp_path_factory.mktemp("native"), policy) as started:
            yield started, upstreams


def claude_client(front_gateway: Gateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=front_gateway.url, api_key=key("dev"), max_retries=0, timeout=PATIENCE_SECONDS)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], **more}


def test_a_message_passes_byte_for_byte(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    source = {"type": "file", "file_id": "file_011"}
    document = {"type": "document", "source": source, "citations": {"enabled": True}}
    turns = [{"role": "user", "content": [document]}]
    asked = body(messages=turns, tools=[SEARCH], top_p=0.90, context_hint={"new": [1.0, "é"]})
    sent = json.dumps(asked, ensure_ascii=False).encode()
    betas = {"anthropic-beta": "files-api-2025-04-14,x-2", "anthropic-version": "2023-06-01"}
    reply = front_gateway.post("messages", sent, **betas)
    assert (reply.status_code, reply.content) == (200, MESSAGE), reply.text
    received = upstreams.requests["claude"][-1]
    assert received.path == "/v1/messages" and received.body == {**json.loads(sent), "model": "theirs"}
    for value in ('"context_hint":{"new": [1.0, "é"]}', json.dumps([SEARCH])):  # the client's bytes
        assert value.encode() in received.content
    assert received.headers["anthropic-version"] == "2023-06-01"
    assert received.headers["anthropic-beta"] == "ours-1,files-api-2025-04-14,x-2"
    receipt = front_gateway.receipt(reply.headers["x-request-id"])
    assert (receipt["input_uncached"], receipt["cache_read"], receipt["output"]) == (90_000, 10_000, 7)
    assert receipt["exact"] and receipt["units"] == {"search": "3"} and receipt["cost"] is not None


def test_a_stream_of_events_passes_byte_for_byte(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    reply = front_gateway.post("messages", body(stream=True, tools=[SEARCH]))
    assert (reply.status_code, reply.content) == (200, STREAM)
    receipt = front_gateway.receipt(reply.headers["x-request-id"])
    assert (receipt["input_uncached"], receipt["output"], receipt["outcome"]) == (90_000, 7, "complete")
    with claude_client(front_gateway).messages.stream(**body(tools=[SEARCH])) as stream:
        final = stream.get_final_message()
    assert final.content[0].citations[0].cited_text == "é"  # type: ignore[union-attr, index]


def test_a_cut_stream_is_an_error_and_billed_by_what_arrived(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    reply = front_gateway.post("messages", body(stream=True, messages=[{"role": "user", "content": "cut"}]))
    assert b"event: error" in reply.content and b"event: message_stop" not in reply.content
    receipt = front_gateway.receipt(reply.headers["x-request-id"])
    assert receipt["outcome"] == "upstream_cut" and receipt["output"] > 1 and not receipt["exact"]


def test_errors_before_the_first_output_go_to_a_fallback_in_its_own_api(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    asked = body(model="fallback", stream=True, messages=[{"role": "user", "content": "overloaded"}])
    reply = front_gateway.post("messages", asked)
    assert b"message_stop" in reply.content and b"59 " in reply.content, reply.text
    assert front_gateway.receipt(reply.headers["x-request-id"])["deployment"] == "chats"
    refused = front_gateway.post("messages", body(messages=[{"role": "user", "content": "refuse"}], tools=[SEARCH]))
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "messages: no")


def test_only_deployments_with_the_api_get_what_cannot_be_translated(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    before = upstreams.request_count("chats")
    for _ in range(4):
        reply = front_gateway.post("messages", body(model="mixed", tools=[SEARCH]))
        assert reply.headers["x-warmpath-deployment"] == "claude" and reply.content == MESSAGE
    assert upstreams.request_count("chats") == before
    for model in ("chat", "translated"):
        refused = front_gateway.post("messages", body(model=model, tools=[SEARCH]))
        assert refused.status_code == 400 and "web_search_20250305" in refused.json()["error"]["message"]
    fast = front_gateway.post("messages", body(speed="fast"))
    assert fast.status_code == 400 and "speed" in fast.json()["error"]["message"]
    assert front_gateway.post("messages", {**body(), "messages": 5}).status_code == 400
    openais = front_gateway.post("chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert openais.json()["object"] == "chat.completion"


def test_tokens_are_counted_in_the_clients_api(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    client = claude_client(front_gateway)
    counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hi"}], tools=[SEARCH])
    assert counted.input_tokens == 41 and upstreams.requests["claude"][-1].body["tools"] == [SEARCH]
    with front_gateway.client() as gpt_client:
        asked: Any = [{"type": "web_search"}]
        tokens = gpt_client.responses.input_tokens.count(model="gpt", input="hi", tools=asked, truncation="auto")
    assert tokens.input_tokens == 43


def test_a_response_passes_and_can_be_continued(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    tools: Any = [{"type": "web_search", "filters": {"allowed_domains": ["x.org"]}}]
    with front_gateway.client() as client:
        first = client.responses.with_raw_response.create(model="gpt", input="hi", tools=tools, truncation="auto")
        whole = first.parse()
        assert (whole.id.startswith("resp_upstream"), whole.output_text) == (True, "Sunny.")
        assert json.loads(first.content)["new_field"] == [1]
        sent = upstreams.requests["gpt"][-1].body
        assert sent == {"model": "theirs", "input": "hi", "tools": tools, "truncation": "auto"}
        receipt = front_gateway.receipt(first.headers["x-request-id"])
        assert (receipt["input_uncached"], receipt["cache_read"], receipt["output"]) == (42, 8, 5)
        again = client.responses.create(model="gpt", input="and?", previous_response_id=whole.id, stream=True)
        kinds = [each.type for each in again]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        sent = upstreams.requests["gpt"][-1].body
        texts = [item["content"][0]["text"] for item in sent["input"]]
        assert texts == ["hi", "Sunny.", "and?"] and "previous_response_id" not in sent
        assert client.responses.retrieve(whole.id).output_text == "Sunny."
        client.responses.create(
            model="gpt", input="third", previous_response_id=f"resp_upstream{upstreams.requests['gpt'][-1].number}"
        )
        assert len(upstreams.requests["gpt"][-1].body["input"]) == 5


def test_a_cut_response_fails(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, _ = front
    with front_gateway.client() as client:
        events = list(client.responses.create(model="gpt", input="cut", stream=True, truncation="auto"))
        assert events[-1].type == "response.failed" and events[-1].sequence_number == 5
        assert events[-1].response.id == events[0].response.id  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(events[-1].response.id)


def test_a_tenants_cap_applies(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    assert front_gateway.post("responses", {"model": "gpt", "input": "hi"}, "capped").status_code == 200
    assert upstreams.requests["gpt"][-1].body["max_output_tokens"] == 77
