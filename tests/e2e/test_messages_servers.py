"""OpenAI's unmodified client, with a deployment that speaks Messages and caches like Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.lib.streaming._deltas import accumulate_delta

from tests.e2e.faults.upstreams import Behaviour, Request, Upstreams, listening
from tests.e2e.processes import PATIENCE_SECONDS, Gateway, gateway, key, simple_policy
from tests.gateway.providers.anthropic.sdk import check_events, check_message, read_request
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.gateway.providers.wires import (
    MESSAGE_STOP,
    block_delta,
    block_start,
    block_stop,
    event,
    message,
    message_delta,
    message_start,
    messages_error,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PRICE = {
    "input": "3", "cached_input": "0.30", "cache_write": "3.75", "cache_write_1h": "6", "output": "15", "version": "x",
}  # fmt: skip
BUCKETS = {"input_uncached": "input", "cache_read": "cached_input", "cache_write": "cache_write", "output": "output"}
LOOK_BACK_BLOCKS = 20
HOUR = {"type": "ephemeral", "ttl": "1h"}
RULES = {"role": "system", "content": "Be exact. " * 200}
QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Cache:
    """A prefix cache with Anthropic's rules: writes at breakpoints, and finds prefixes up to 20 blocks before one.

    A token is four bytes.
    """

    def __init__(self) -> None:
        self._prefixes: set[str] = set()

    def take(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the usage of the prompt, and cache it."""
        turns = [(turn["role"], block) for turn in request["messages"] for block in turn["content"]]
        blocks = [*(("tool", t) for t in request.get("tools", [])), *(("system", s) for s in request.get("system", []))]
        prompt, marks, hours = [], [], []
        for role, block in [*blocks, *turns]:
            mark = block.pop("cache_control", None)
            prompt.append(json.dumps([role, block]))
            if mark:
                marks.append(len(prompt))
                hours.append(mark.get("ttl") == "1h")
        assert len(marks) <= 4
        found = [n for mark in marks for n in range(mark, max(mark - LOOK_BACK_BLOCKS, 0), -1) if self._key(prompt, n)]
        read, written = max(found, default=0), marks[-1] if marks else 0
        self._prefixes |= {"".join(prompt[:mark]) for mark in marks}
        write_tokens = tokens(prompt[read:written])
        used_ttl = "ephemeral_1h_input_tokens" if any(hours) else "ephemeral_5m_input_tokens"
        other_ttl = "ephemeral_5m_input_tokens" if any(hours) else "ephemeral_1h_input_tokens"
        return {
            "input_tokens": tokens(prompt[max(read, written) :]), "cache_read_input_tokens": tokens(prompt[:read]),
            "cache_creation_input_tokens": write_tokens, "cache_creation": {used_ttl: write_tokens, other_ttl: 0},
            "service_tier": "standard",
        }  # fmt: skip

    def _key(self, prompt: list[str], count: int) -> bool:
        return "".join(prompt[:count]) in self._prefixes


def tokens(parts: list[str]) -> int:
    return sum(map(len, parts)) // 4


class Claude:
    """A scripted deployment. With a tool, it thinks, calls it, and answers with its result; else it says hello."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.counted: list[dict[str, Any]] = []

    async def __call__(self, request: Request) -> None:
        message_request = (
            read_request(json.dumps(request.body).encode()) if request.path == "/v1/messages" else request.body
        )
        if request.path == "/v1/messages/count_tokens":
            await request.write(json_response(b'{"input_tokens": 42}'))
            return
        content = self._answer(message_request)
        reason = "tool_use" if content[-1]["type"] == "tool_use" else "end_turn"
        counts = self.cache.take(message_request)
        self.counted.append({**counts, "output_tokens": 17, "output_tokens_details": {"thinking_tokens": 5}})
        if message_request.get("stream"):
            stream = streamed(content, reason, {**counts, "output_tokens": 1}, self.counted[-1])
            check_events(stream)
            await request.write(STREAM_HEAD + chunked(stream) + STREAM_END)
        else:
            body = json.dumps(message(content, self.counted[-1], stop_reason=reason)).encode()
            check_message(body)
            await request.write(json_response(body))

    def _answer(self, message_request: dict[str, Any]) -> list[dict[str, Any]]:
        last = message_request["messages"][-1]["content"]
        if last[0]["type"] == "tool_result":
            thinking = message_request["messages"][-2]["content"][0]
            assert thinking == {"type": "thinking", "thinking": "I must look.", "signature": "c2lnbmVk"}
            return [{"type": "text", "text": f"It is {last[0]['content'][0]['text']}."}]
        if "tools" in message_request:
            return [
                {"type": "thinking", "thinking": "I must look.", "signature": "c2lnbmVk"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
            ]
        return [{"type": "text", "text": "Hello there."}]


def streamed(content: list[dict[str, Any]], reason: str, first: dict[str, Any], last: dict[str, Any]) -> bytes:
    events = [message_start(first), event(type="ping")]
    for index, block in enumerate(content):
        match block["type"]:
            case "text":
                events += [block_start(index, type="text", text="")]
                events += [block_delta(index, type="text_delta", text=word) for word in block["text"].split(" ")]
            case "thinking":
                events += [block_start(index, type="thinking", thinking="", signature="")]
                events += [block_delta(index, type="thinking_delta", thinking=block["thinking"])]
                events += [block_delta(index, type="signature_delta", signature=block["signature"])]
            case "tool_use":
                events += [block_start(index, **{**block, "input": {}})]
                events += [block_delta(index, type="input_json_delta", partial_json=json.dumps(block["input"]))]
        events += [block_stop(index)]
    counts = {name: last[name] for name in ("output_tokens", "output_tokens_details")}
    return b"".join([*events, message_delta(reason, **counts), MESSAGE_STOP])


@contextmanager
def in_front_of(folder: Path, **behaviours: Behaviour) -> Iterator[tuple[Gateway, openai.OpenAI, Upstreams]]:
    """A gateway with several deployments of one model. Those named `chat...` speak OpenAI's dialect.

    Messages are translated, too. test_native_apis.py has those that pass unchanged.
    """
    with listening(behaviours) as upstreams:
        servers: list[dict[str, Any]] = [
            {
                "name": name, "provider": "openai" if name.startswith("chat") else "anthropic", "model": "claude",
                "base_url": f"http://127.0.0.1:{upstreams.ports[name]}/v1", "price": PRICE,
                "api_key": {"env": "KEY_AT_CLAUDE"}, "native": [],
            }
            for name in behaviours
        ]  # fmt: skip
        policy = simple_policy(
            "http://unused",
            deployments=servers,
            models=[{"name": "m", "deployments": list(behaviours)}],
            classes={"realtime": {"inter_token": "1s"}},
            routing={"strategy": "round_robin"},
        )
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("KEY_AT_CLAUDE", "sk-ant-secret")
            with gateway(folder, policy) as front, front.client() as client:
                yield front, client, upstreams


def billed(receipt: dict[str, Any]) -> dict[str, int]:
    names = ("input_uncached", "cache_read", "cache_write", "cache_write_1h", "output", "reasoning")
    return {name: receipt.get(name, 0) for name in names}


def as_counted(counts: dict[str, Any]) -> dict[str, int]:
    """Return the ledger's buckets for Anthropic's usage."""
    return {
        "input_uncached": counts["input_tokens"], "cache_read": counts["cache_read_input_tokens"],
        "cache_write": counts["cache_creation_input_tokens"],
        "cache_write_1h": counts["cache_creation"]["ephemeral_1h_input_tokens"],
        "output": counts["output_tokens"], "reasoning": counts["output_tokens_details"]["thinking_tokens"],
    }  # fmt: skip


def cost_of(buckets: dict[str, int]) -> Decimal:
    hour = buckets["cache_write_1h"]
    parts = {**buckets, "cache_write": buckets["cache_write"] - hour}
    sums = [parts[bucket] * Decimal(PRICE[price]) for bucket, price in BUCKETS.items()]
    return (sum(sums) + hour * Decimal(PRICE["cache_write_1h"])) / 1_000_000


def whole_turn(
    client: openai.OpenAI, messages: list[Any], **fields: Any
) -> tuple[dict[str, Any], openai.types.CompletionUsage]:
    """Stream one answer, and return the assistant's message to send back, and its usage."""
    stream = client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    )
    turn: dict[Any, Any] = {}
    for chunk in stream:
        for choice in chunk.choices:
            turn = accumulate_delta(turn, choice.delta.to_dict())
    assert chunk.usage is not None
    return turn, chunk.usage


def test_streamed_tool_calls_are_cached_and_billed_to_the_token(tmp_path: Path) -> None:
    claude = Claude()
    with in_front_of(tmp_path, claude=claude) as (front, client, _):
        messages: list[Any] = [RULES, QUESTION]
        turn, _ = whole_turn(client, messages, tools=[TOOL], reasoning_effort="low")
        assert turn["reasoning_content"] == "I must look."
        (call,) = turn["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Rome"})
        messages += [turn, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        turn, usage = whole_turn(client, messages, tools=[TOOL], reasoning_effort="low")
        assert turn["content"] == "Itissunny."
        receipts = front.receipts()
    first, second = claude.counted
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"] > 500, "a complete cache hit"
    for receipt, counts in zip(receipts, claude.counted, strict=True):
        assert billed(receipt) == as_counted(counts)
        assert Decimal(receipt["cost"]) == cost_of(as_counted(counts))
        assert (receipt["exact"], receipt["source"], receipt["outcome"]) == (True, "engine", "complete")
        assert (receipt["service_tier"], receipt["model_served"]) == ("default", "claude")
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == second["cache_read_input_tokens"]
    assert usage.prompt_tokens == sum(billed(receipts[1])[b] for b in ("input_uncached", "cache_read", "cache_write"))


def test_a_whole_answer_and_a_one_hour_cache(tmp_path: Path) -> None:
    claude = Claude()
    with in_front_of(tmp_path, claude=claude) as (front, client, _):
        rules: Any = {
            "role": "system",
            "content": [{"type": "text", "text": "Be exact. " * 200, "cache_control": HOUR}],
        }
        for _ in range(2):
            reply = client.chat.completions.create(model="m", messages=[rules, QUESTION])
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Hello there.", "stop")
            assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
            cached_tokens = reply.usage.prompt_tokens_details.cached_tokens
        receipts = front.receipts()
    first, second = [billed(receipt) for receipt in receipts]
    assert first["cache_write_1h"] == first["cache_write"] == second["cache_read"] > 400
    assert [Decimal(receipt["cost"]) for receipt in receipts] == [cost_of(first), cost_of(second)]
    assert cached_tokens == second["cache_read"]


STARTED = {"input_tokens": 7, "output_tokens": 1, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 0}
BEGUN = message_start(STARTED) + block_start(0, type="text", text="") + block_delta(0, type="text_delta", text="Hello")


async def resets_connection(request: Request) -> None:
    await request.write(STREAM_HEAD + chunked(BEGUN))
    request.reset()


async def ends_early(request: Request) -> None:
    await request.write(STREAM_HEAD + chunked(BEGUN + block_stop(0)) + STREAM_END)


async def sends_error_event(request: Request) -> None:
    failed = event(**messages_error("overloaded_error", "Overloaded"))
    await request.write(STREAM_HEAD + chunked(BEGUN + event(type="ping")))
    await request.write(chunked(failed) + STREAM_END)


async def stalls(request: Request) -> None:
    await request.write(STREAM_HEAD + chunked(BEGUN))
    await request.stay_silent()


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        (resets_connection, "upstream_cut"), (ends_early, "upstream_cut"), (sends_error_event, "upstream_cut"),
        (stalls, "timeout"),
    ],
)  # fmt: skip
def test_a_failed_stream_is_an_error_and_billed_for_what_arrived(
    tmp_path: Path, behaviour: Behaviour, outcome: str
) -> None:
    with in_front_of(tmp_path, claude=behaviour) as (front, client, _):
        stream = client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
        text = ""
        with pytest.raises(openai.APIError) as failed:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        (receipt,) = front.receipts()
    assert (text, failed.value.code) == ("Hello", "upstream_cut")
    assert receipt["outcome"] == outcome
    assert (receipt["input_uncached"], receipt["cache_read"], receipt["output"]) == (7, 90, 3)
    assert not receipt["exact"]  # one token by the first event, and two for the bytes of the text


def test_a_client_that_disconnects_is_billed_for_the_prompt(tmp_path: Path) -> None:
    with in_front_of(tmp_path, claude=stalls) as (front, client, _):
        with client.chat.completions.create(model="m", messages=[QUESTION], stream=True) as stream:
            while not next(stream).choices[0].delta.content:
                pass
            call_id = stream.response.headers["x-request-id"]
        receipt = front.receipt(call_id)
    assert (receipt["outcome"], receipt["input_uncached"], receipt["cache_read"]) == ("client_gone", 7, 90)


def rejecting(status: str, kind: str, text: str, *headers: str) -> Behaviour:
    async def reject(request: Request) -> None:
        await request.write(json_response(json.dumps(messages_error(kind, text)).encode(), status, *headers))

    return reject


def test_an_overloaded_deployment_fails_over(tmp_path: Path) -> None:
    overloaded = rejecting("529 Overloaded", "overloaded_error", "Overloaded")
    with in_front_of(tmp_path, full=overloaded, claude=Claude()) as (front, client, upstreams):
        for _ in range(2):
            assert client.chat.completions.create(model="m", messages=[QUESTION]).choices[0].message.content
        assert upstreams.request_count("full") >= 1
        receipts = front.receipts()
    attempts = [(attempt["deployment"], attempt["outcome"]) for receipt in receipts for attempt in receipt["attempts"]]
    assert ("full", "status_503") in attempts
    assert attempts.count(("claude", "complete")) + attempts.count(("claude", "ok")) == 2


def test_if_all_are_overloaded_the_client_gets_retry_after(tmp_path: Path) -> None:
    busy = rejecting("429 Too Many Requests", "rate_limit_error", "too fast", "retry-after: 33")
    with in_front_of(tmp_path, claude=busy) as (_, client, _):
        with pytest.raises(openai.InternalServerError) as failed:
            client.chat.completions.create(model="m", messages=[QUESTION])
        assert failed.value.status_code == 503
        assert 30 <= int(failed.value.response.headers["retry-after"]) <= 33


def test_a_rejection_has_openais_form_and_leaks_no_key(tmp_path: Path) -> None:
    too_long = rejecting("400 Bad Request", "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum")
    with in_front_of(tmp_path / "a", claude=too_long) as (_, client, _):
        with pytest.raises(openai.BadRequestError) as rejection:
            client.chat.completions.create(model="m", messages=[QUESTION])
        assert rejection.value.code == "context_length_exceeded"
        assert "prompt is too long: 9 tokens" in rejection.value.message
    no_key = rejecting("401 Unauthorized", "authentication_error", "invalid key sk-ant-secret")
    with in_front_of(tmp_path / "b", claude=no_key) as (_, client, _):
        with pytest.raises(openai.InternalServerError) as failed:
            client.chat.completions.create(model="m", messages=[QUESTION])
        text = failed.value.response.text
        assert not any(word in text for word in ("sk-ant", "KEY_AT_CLAUDE", "invalid key"))


def test_a_field_unknown_to_messages_goes_to_a_deployment_that_knows_it(tmp_path: Path) -> None:
    async def answer(request: Request) -> None:
        await request.whole(3)

    with in_front_of(tmp_path / "both", claude=Claude(), chat=answer) as (_, client, upstreams):
        for seed in range(3):
            client.chat.completions.create(model="m", messages=[QUESTION], seed=seed)
        assert (upstreams.request_count("chat"), upstreams.request_count("claude")) == (3, 0)
    with in_front_of(tmp_path / "one", claude=Claude()) as (front, client, upstreams):
        with pytest.raises(openai.BadRequestError) as rejection:
            client.chat.completions.create(model="m", messages=[QUESTION], seed=7)
        assert (rejection.value.param, rejection.value.code) == ("seed", "unsupported_parameter")
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            client.embeddings.create(model="m", input="x", encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="completions"):
            client.completions.create(model="m", prompt="x")
        assert upstreams.request_count("claude") == 0
        assert front.receipts() == [], "nothing was sent"


def test_signed_thinking_is_sent_to_its_deployment_only(tmp_path: Path) -> None:
    """A strict deployment takes over in the middle of a conversation."""

    async def strict(request: Request) -> None:
        if any("thinking_blocks" in each for each in request.body["messages"]):
            await request.refuse("400 Bad Request", code="unknown_parameter")
        else:
            await request.whole(3)

    async def once(request: Request) -> None:
        if request.number:
            await rejecting("529 Overloaded", "overloaded_error", "Overloaded", "retry-after: 60")(request)
        else:
            await claude(request)

    claude = Claude()
    with in_front_of(tmp_path, claude=once, chat=strict) as (front, client, upstreams):
        messages: list[Any] = [QUESTION]
        while not upstreams.request_count("claude"):
            turn, _ = whole_turn(client, messages, tools=[TOOL])
        messages += [turn, {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "sunny"}]
        assert turn["thinking_blocks"]
        for _ in range(2):
            turn, _ = whole_turn(client, messages, tools=[TOOL])
            assert turn["content"] == "0 1 2 "
        used = {attempt["deployment"] for receipt in front.receipts()[-2:] for attempt in receipt["attempts"]}
    assert used == {"claude", "chat"}


def test_anthropics_client_reaches_it_too(tmp_path: Path) -> None:
    claude = Claude()
    with in_front_of(tmp_path, claude=claude) as (front, _, upstreams):
        options: Any = {"base_url": front.url, "api_key": key("dev"), "max_retries": 0, "timeout": PATIENCE_SECONDS}
        with anthropic.Anthropic(**options) as client:
            fields: Any = {"model": "m", "messages": [QUESTION], "thinking": {"type": "disabled"}}
            reply = client.messages.create(max_tokens=50, **fields)
            assert client.messages.count_tokens(**fields).input_tokens == 42
    assert [block.text for block in reply.content if block.type == "text"] == ["Hello there."]
    assert (reply.usage.input_tokens, reply.usage.cache_creation_input_tokens) == (
        claude.counted[0]["input_tokens"], claude.counted[0]["cache_creation_input_tokens"],
    )  # fmt: skip
    assert upstreams.requests["claude"][0].body["thinking"] == {"type": "disabled"}


@pytest.mark.parametrize("streamed", [True, False])
def test_breakpoints_of_anthropics_client_are_preserved_and_billed(tmp_path: Path, streamed: bool) -> None:
    claude = Claude()
    rules: Any = {"type": "text", "text": "Be exact. " * 200, "cache_control": HOUR}
    fields: Any = {"model": "m", "max_tokens": 50, "system": [rules], "messages": [QUESTION]}
    with in_front_of(tmp_path, claude=claude) as (front, _, upstreams):
        options: Any = {"base_url": front.url, "api_key": key("dev"), "max_retries": 0, "timeout": PATIENCE_SECONDS}
        with anthropic.Anthropic(**options) as client:
            for _ in range(2):
                if streamed:
                    with client.messages.stream(**fields) as stream:
                        reply = stream.get_final_message()
                else:
                    reply = client.messages.create(**fields)
        receipts = [billed(receipt) for receipt in front.receipts()]
        costs = [Decimal(receipt["cost"]) for receipt in front.receipts()]
    body = upstreams.requests["claude"][0].body
    assert body["system"] == [rules] and "cache_control" not in json.dumps(body["messages"]), "the gateway adds none"
    assert receipts == [as_counted(counts) for counts in claude.counted]
    assert receipts[0]["cache_write_1h"] == receipts[0]["cache_write"] == receipts[1]["cache_read"] > 400
    assert costs == [cost_of(receipt) for receipt in receipts]
    assert reply.usage.cache_read_input_tokens == receipts[1]["cache_read"]


def test_signed_thinking_survives_both_translations(tmp_path: Path) -> None:
    """Anthropic's client with tools and thinking, and a deployment that requires its signature back."""
    claude = Claude()
    weather: Any = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    fields: Any = {"model": "m", "max_tokens": 500, "tools": [weather], "thinking": {"type": "adaptive"}}
    with in_front_of(tmp_path, claude=claude) as (front, _, _):
        options: Any = {"base_url": front.url, "api_key": key("dev"), "max_retries": 0, "timeout": PATIENCE_SECONDS}
        with anthropic.Anthropic(**options) as client:
            for streamed in (True, False):
                if streamed:
                    with client.messages.stream(**fields, messages=[QUESTION]) as stream:
                        first = stream.get_final_message()
                else:
                    first = client.messages.create(**fields, messages=[QUESTION])
                assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
                call = first.content[-1]
                assert call.type == "tool_use"
                parts: Any = [{"type": "text", "text": "sunny"}]
                result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": parts}
                turns = [QUESTION, first.to_param(), {"role": "user", "content": [result]}]
                second = client.messages.create(**fields, messages=turns)
                assert [block.text for block in second.content if block.type == "text"] == ["It is sunny."]


@pytest.mark.parametrize("streamed", [True, False])
def test_signed_thinking_survives_the_responses_api(tmp_path: Path, streamed: bool) -> None:
    """OpenAI's client requests reasoning that it can send back."""
    weather: Any = {"type": "function", "strict": None, **TOOL["function"]}
    fields: Any = {
        "model": "m", "max_output_tokens": 500, "tools": [weather], "reasoning": {"effort": "high"},
        "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    items: list[Any] = [QUESTION]
    claude = Claude()
    with in_front_of(tmp_path, claude=claude) as (front, client, _):
        if streamed:
            with client.responses.stream(**fields, input=items) as stream:
                first: Any = stream.get_final_response()
        else:
            first = client.responses.create(**fields, input=items)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        items += [*first.output, {"type": "function_call_output", "call_id": "toolu_1", "output": "sunny"}]
        assert client.responses.create(**fields, input=items).output_text == "It is sunny."
        assert billed(front.receipts()[0]) == as_counted(claude.counted[0])
    assert first.usage.output_tokens_details.reasoning_tokens == 5
    assert (
        first.usage.input_tokens
        == first.usage.input_tokens_details.cache_write_tokens + (claude.counted[0]["input_tokens"])
    )
