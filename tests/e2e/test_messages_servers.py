"""OpenAI's unmodified client, with a deployment that speaks Messages and caches like Anthropic's."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.claude import (
    HOUR,
    QUESTION,
    RULES,
    TOOL,
    Claude,
    as_counted,
    billed,
    cost_of,
    in_front_of,
    rejecting,
    whole_turn,
)
from tests.e2e.faults.upstreams import Behaviour, Request
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked
from tests.gateway.providers.wires import (
    block_delta,
    block_start,
    block_stop,
    event,
    message_start,
    messages_error,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


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
