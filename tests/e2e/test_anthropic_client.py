"""The unmodified `anthropic` client through gateway and engine, and in front of a deployment that calls tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest

from tests.e2e.faults.upstreams import Behaviour, Request, listening, usage
from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Wire,
    chat,
    gateway,
    key,
    simple_policy,
)
from tests.gateway.providers.scripted_server import json_response

pytestmark = pytest.mark.e2e

HELLO: Any = {"role": "user", "content": "What is a KV cache?"}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client_of(front: Gateway, who: str = "dev", **options: Any) -> anthropic.Anthropic:
    given = {"max_retries": 0, "timeout": PATIENCE_SECONDS, "_strict_response_validation": True} | options
    return anthropic.Anthropic(base_url=front.url, api_key=key(who), **given)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_and_its_receipt(local_gateway: Gateway) -> None:
    with client_of(local_gateway) as client:
        message = client.messages.create(model="demo", max_tokens=8, messages=[HELLO], metadata={"user_id": "u-1"})
    assert text_of(message)
    assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
    assert message._request_id is not None
    receipt = local_gateway.receipt(message._request_id)
    usage = message.usage
    assert (receipt["output"], receipt["input_uncached"], receipt["cache_read"]) == (
        usage.output_tokens, usage.input_tokens, usage.cache_read_input_tokens,
    )  # fmt: skip
    assert (receipt["outcome"], receipt["end_user"], receipt["exact"]) == ("complete", "u-1", True)


def test_the_streaming_helper_equals_the_whole_message(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "max_tokens": 24, "messages": [HELLO], "system": "Be brief."}
    options["extra_body"] = {"temperature": 0}  # the client no longer has a parameter for it
    with client_of(local_gateway) as client:
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            content = "".join(stream.text_stream)
            folded = stream.get_final_message()
        kinds = [event.type for event in client.messages.create(**options, stream=True)]
    assert content == text_of(whole) == text_of(folded) != ""
    assert (folded.stop_reason, folded.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert folded.usage.input_tokens + (folded.usage.cache_read_input_tokens or 0) > 0
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_an_effort_is_accepted_by_models_without_reasoning(local_gateway: Gateway) -> None:
    """Coding agents send one to every model. For a client of chat, it is an error."""
    with client_of(local_gateway) as client:
        options: Any = {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}
        assert text_of(client.messages.create(model=DEMO, max_tokens=8, messages=[HELLO], **options))
    assert local_gateway.post("chat/completions", chat(reasoning_effort="high")).status_code == 400


def test_a_stop_sequence_is_named(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "max_tokens": 24, "messages": [HELLO], "extra_body": {"temperature": 0}}
    with client_of(local_gateway) as client:
        stop = text_of(client.messages.create(**options))[8:11]
        options["stop_sequences"] = ["not in the answer", stop]
        message = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            assert stream.get_final_message().stop_sequence == stop
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


async def test_the_async_client(local_gateway: Gateway) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=local_gateway.url, api_key=key("dev"), timeout=PATIENCE_SECONDS
    ) as client:
        async with client.messages.stream(model=DEMO, max_tokens=8, messages=[HELLO]) as stream:
            content = "".join([text async for text in stream.text_stream])
        message = await client.messages.create(model=DEMO, max_tokens=8, messages=[HELLO])
    assert content and text_of(message)


def test_the_key_header_of_older_clients(local_gateway: Gateway) -> None:
    reply = httpx2.post(
        f"{local_gateway.url}/v1/messages?beta=true",
        json={"model": DEMO, "max_tokens": 1, "messages": [HELLO]},
        headers={"x-api-key": key("dev"), "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
        timeout=PATIENCE_SECONDS,
    )
    assert (reply.status_code, reply.json()["usage"]["output_tokens"]) == (200, 1)


def test_equal_prompts_of_both_endpoints_share_a_prefix(local_gateway: Gateway) -> None:
    system = "You answer questions about inference servers, and you answer them briefly and exactly. " * 8
    body = chat(HELLO["content"], max_tokens=1)
    body["messages"].insert(0, {"role": "system", "content": system})
    assert local_gateway.post("chat/completions", body).status_code == 200
    with client_of(local_gateway) as client:
        usage = client.messages.create(model=DEMO, max_tokens=1, messages=[HELLO], system=system).usage
    assert usage.input_tokens <= 16  # the engine's block size
    assert (usage.cache_read_input_tokens or 0) >= 128


def test_tokens_are_counted_by_the_engine(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "messages": [HELLO], "system": "Be brief."}
    with client_of(local_gateway) as client:
        counted = client.messages.count_tokens(**options).input_tokens
        usage = client.messages.create(**options, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


def test_models(local_gateway: Gateway) -> None:
    with client_of(local_gateway) as client:
        names = [model.id for model in client.models.list(limit=2)]  # all pages
        assert names[:2] == [DEMO, "demo"] and len(names) == len(set(names)) > 2
        assert client.models.retrieve("demo").display_name == "demo"
    with local_gateway.client() as openai_client:
        assert [model.id for model in openai_client.models.list()] == names


def test_errors_raise_the_clients_exception_classes(local_gateway: Gateway) -> None:
    def ask(who: str = "dev", **fields: Any) -> None:
        with client_of(local_gateway, who) as client:
            client.messages.create(**{"model": DEMO, "max_tokens": 1, "messages": [HELLO], **fields})

    with pytest.raises(anthropic.AuthenticationError) as unknown:
        ask("unknown")
    assert unknown.value.type == "authentication_error" and unknown.value.request_id is not None
    assert unknown.value.body["request_id"] == unknown.value.request_id  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(model="none")
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.type.*web_search") as unfit:
        ask(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert unfit.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"):
        ask(messages=[{"role": "user", "content": "word " * 5000}])
    ask("paced_messages")
    with pytest.raises(anthropic.RateLimitError) as limited:
        ask("paced_messages")
    assert limited.value.type == "rate_limit_error"
    assert 0 < float(limited.value.response.headers["retry-after"]) <= 120
    with pytest.raises(anthropic.InternalServerError) as dead:
        ask(model="dead")
    assert dead.value.type == "api_error" and dead.value.status_code == 502


def test_a_full_queue_is_an_overload(local_gateway: Gateway) -> None:
    holding = {"model": "one-at-a-time", "messages": [HELLO], "stream": True, "max_tokens": 1800, "ignore_eos": True}
    with Wire(local_gateway, "chat/completions", holding) as client:
        client.read_until(b"data: ", times=2)
        hasty = client_of(local_gateway, default_headers={"x-class": "short-queue"})
        with hasty, pytest.raises(anthropic.OverloadedError) as rejection:
            hasty.messages.create(model="one-at-a-time", max_tokens=1, messages=[HELLO])
    assert (rejection.value.status_code, rejection.value.type) == (529, "overloaded_error")
    assert rejection.value.response.headers["x-should-retry"] == "true"


def test_a_deployment_of_anthropics_dialect(
    tmp_path: Path, local_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are translated to chat and back to messages, for another gateway, without any loss."""
    monkeypatch.setenv("KEY_OF_THE_OTHER", key("dev"))
    url = f"{local_gateway.url}/v1"
    there = {"provider": "anthropic", "api_key": {"env": "KEY_OF_THE_OTHER"}}
    policy = simple_policy(
        url,
        deployments=[{"name": "other", "base_url": url, "model": DEMO, "max_concurrency": 4, **there}],
        models=[{"name": "m", "deployments": ["other"]}],
    )
    options: Any = {"max_tokens": 24, "messages": [HELLO], "system": "Be brief.", "extra_body": {"temperature": 0}}
    with (
        gateway(tmp_path, policy) as front,
        client_of(front) as client,
        client_of(local_gateway) as direct,
    ):
        whole, unproxied = client.messages.create(model="m", **options), direct.messages.create(model=DEMO, **options)
        with client.messages.stream(model="m", **options) as stream:
            folded = stream.get_final_message()
        assert text_of(whole) == text_of(folded) == text_of(unproxied)
        assert whole.stop_reason == folded.stop_reason == unproxied.stop_reason
        assert folded.usage.output_tokens == unproxied.usage.output_tokens
        counts = {name: value for name, value in options.items() if name in ("messages", "system")}
        counted = client.messages.count_tokens(model="m", **counts).input_tokens
        assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def the_weather(request: Request) -> None:
    """A deployment of chat that calls the tool, and answers with its result."""
    last = request.body["messages"][-1]
    if last["role"] == "tool":
        parts: list[Any] = [{"content": f"It is {last['content']}."}]
        finish = "stop"
    else:
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        parts = [{"reasoning_content": "I must look."}, {"content": "Let me look."}, {"tool_calls": [call]}]
        parts += [{"tool_calls": [{"index": 0, "function": {"arguments": a}}]} for a in ('{"city": ', '"Paris"}')]
        finish = "tool_calls"
    if not request.streams:
        choice = {"index": 0, "message": {"role": "assistant", **parts[0]}, "finish_reason": finish}
        await request.write(json_response(json.dumps({"model": "m", "choices": [choice], "usage": usage(5)}).encode()))
        return
    await request.head()
    for part in parts:
        await request.frame({"delta": part})
    await request.finish(finish, 9)


async def three_words(request: Request) -> None:
    await request.head()
    await request.tokens(0, 3)
    await request.stay_silent()


@contextmanager
def in_front_of(folder: Path, behaviour: Behaviour) -> Iterator[tuple[Gateway, anthropic.Anthropic]]:
    with listening({"only": behaviour}) as upstreams:
        url = f"http://127.0.0.1:{upstreams.ports['only']}/v1"
        policy = simple_policy(
            url,
            deployments=[{"name": "only", "base_url": url, "model": "m", "max_concurrency": 4}],
            models=[{"name": "m", "deployments": ["only"]}],
        )
        with gateway(folder, policy) as front, client_of(front) as client:
            yield front, client


def test_a_client_that_disconnects_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    with in_front_of(tmp_path, three_words) as (front, client):
        with client.messages.stream(model="m", max_tokens=9, messages=[HELLO]) as stream:
            content = [text for _, text in zip(range(3), stream.text_stream, strict=False)]
            call_id = stream.response.headers["request-id"]
        receipt = front.receipt(call_id)
    assert content == ["0 ", "1 ", "2 "]
    assert (receipt["outcome"], receipt["output"]) == ("client_gone", 2)  # six bytes, estimated


def test_tool_calls_and_results(tmp_path: Path) -> None:
    options: Any = {"model": "m", "max_tokens": 100, "tools": [WEATHER]}
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    with in_front_of(tmp_path, the_weather) as (front, client):
        with client.messages.stream(**options, messages=[question]) as stream:
            first = stream.get_final_message()
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        call = first.content[-1]
        assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Paris"})
        assert first.stop_reason == "tool_use"
        content: Any = [{"type": "text", "text": "sunny"}]
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        turns = [question, first.to_param(), {"role": "user", "content": [result]}]
        second = client.messages.create(**options, messages=turns)
        assert (text_of(second), second.stop_reason) == ("It is sunny.", "end_turn")
        assert [row["output"] for row in front.receipts()] == [9, 5]
        with pytest.raises(anthropic.InternalServerError) as not_counted:
            client.messages.count_tokens(model="m", messages=[question])
        assert (not_counted.value.status_code, not_counted.value.error_code) == (501, "not_counted")


@pytest.mark.slow
def test_a_deployment_that_cuts_a_stream(tmp_path: Path) -> None:
    async def breaks_off(request: Request) -> None:
        await request.head()
        await request.tokens(0, 3)
        request.reset()

    with in_front_of(tmp_path, breaks_off) as (front, client):
        asking = client.messages.stream(model="m", max_tokens=9, messages=[HELLO])
        with pytest.raises(anthropic.APIStatusError) as broken, asking as stream:
            stream.get_final_message()
        assert (broken.value.type, broken.value.error_code) == ("api_error", "upstream_cut")
        assert front.receipts()[0]["outcome"] == "upstream_cut"
