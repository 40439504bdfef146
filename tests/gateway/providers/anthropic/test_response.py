"""Translation of Messages responses to chat completions: streams in any split, whole messages and errors."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.billing.metering import Meter
from gateway.providers.anthropic.response import (
    MessageStreamTranslator,
    chat_completion,
    openai_error,
)
from gateway.providers.sse import MAX_FRAME_BYTES, FrameSplitter
from gateway.providers.translation import MalformedAnswer
from gateway.types import Usage
from tests.gateway.calls import a_call, chat
from tests.gateway.providers.anthropic.sdk import check_events, check_message
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
    timeless,
)

STARTED = {
    "input_tokens": 10, "output_tokens": 1, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20,
    "cache_creation": {"ephemeral_5m_input_tokens": 5, "ephemeral_1h_input_tokens": 15}, "service_tier": "standard",
}  # fmt: skip
ENDED = {**STARTED, "output_tokens": 40, "output_tokens_details": {"thinking_tokens": 12}}
BILLED = Usage(
    input_uncached=10, cache_read=100, cache_write=20, output=40, reasoning=12, exact=True, cache_write_1h=15
)  # fmt: skip

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000  # nested too deeply for the JSON decoder
TOWN = '{"town": "Zürich"}'
STREAM = b"".join(
    [
        message_start(STARTED),
        event(type="ping"),
        block_start(0, type="thinking", thinking="", signature=""),
        block_delta(0, type="thinking_delta", thinking="The user "),
        block_delta(0, type="thinking_delta", thinking="wants weather."),
        block_delta(0, type="signature_delta", signature="c2ln"),
        block_stop(0),
        block_start(1, type="redacted_thinking", data="b3BhcXVl"),
        block_stop(1),
        block_start(2, type="text", text=""),
        block_delta(2, type="text_delta", text="I look ☀"),
        block_delta(2, type="text_delta", text="\n\ndata: [DONE]\n\n"),
        block_stop(2),
        block_start(3, type="tool_use", id="toolu_1", name="weather", input={}),
        block_delta(3, type="input_json_delta", partial_json=""),
        block_delta(3, type="input_json_delta", partial_json=TOWN[:9]),
        block_delta(3, type="input_json_delta", partial_json=TOWN[9:]),
        block_stop(3),
        block_start(4, type="tool_use", id="toolu_2", name="now", input={}),
        block_stop(4),
        message_delta("tool_use", output_tokens=40, output_tokens_details={"thinking_tokens": 12}),
        MESSAGE_STOP,
    ]
)
WHOLE = message(
    [
        {"type": "thinking", "thinking": "The user wants weather.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "text", "text": "I look ☀\n\ndata: [DONE]\n\n"},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": json.loads(TOWN)},
        {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
    ],
    ENDED,
    stop_reason="tool_use",
)


def chunks_of(stream: bytes, *cuts: int) -> bytes:
    splitter, translator, chunks = FrameSplitter(MAX_FRAME_BYTES), MessageStreamTranslator(), b""
    offsets = [0, *sorted(cut % len(stream) for cut in cuts), len(stream)]
    for begin, end in itertools.pairwise(offsets):
        chunks += translator.feed(splitter.feed(stream[begin:end]))
    assert translator.ended
    return timeless(chunks)


def read(chunks: bytes) -> list[dict[str, Any]]:
    *frames, done, rest = chunks.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames if frame != b": ping"]


def joined_deltas(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The deltas, joined like OpenAI's client does."""
    whole: dict[Any, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = accumulate_delta(whole, choice["delta"])
    return whole


def test_the_test_data_is_valid_for_anthropic_s_sdk() -> None:
    check_events(STREAM)
    check_message(json.dumps(WHOLE).encode())


@given(st.lists(st.integers(min_value=0), max_size=40))
def test_any_split_of_the_bytes_gives_the_same_chunks(cuts: list[int]) -> None:
    assert chunks_of(STREAM, *cuts) == chunks_of(STREAM)


def test_a_split_after_every_byte_gives_the_same_chunks() -> None:
    assert chunks_of(STREAM, *range(len(STREAM))) == chunks_of(STREAM)


def test_every_chunk_is_valid_for_openai_s_sdk() -> None:
    chunks = read(chunks_of(STREAM))
    for number, chunk in enumerate(chunks):
        ChatCompletionChunk.model_validate({"created": 0, **chunk}, strict=True)
        assert [choice["finish_reason"] for choice in chunk["choices"]] == {
            len(chunks) - 2: ["tool_calls"], len(chunks) - 1: []
        }.get(number, [None])  # fmt: skip
    assert {chunk["id"] for chunk in chunks} == {"msg_1"}
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}


def test_a_stream_and_a_whole_message_give_the_same_answer() -> None:
    chunks = read(chunks_of(STREAM))
    whole = json.loads(chat_completion(json.dumps(WHOLE).encode()))
    ChatCompletion.model_validate(whole, strict=True)
    (choice,) = whole["choices"]
    delta = joined_deltas(chunks)
    assert delta["content"] == choice["message"]["content"] == "I look ☀\n\ndata: [DONE]\n\n"
    assert delta["reasoning_content"] == choice["message"]["reasoning_content"] == "The user wants weather."
    thinking = [{name: value for name, value in part.items() if name != "index"} for part in delta["thinking_blocks"]]
    assert thinking == choice["message"]["thinking_blocks"] == WHOLE["content"][:2]
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in delta["tool_calls"]
    ]
    assert calls == [("toolu_1", "weather", json.loads(TOWN)), ("toolu_2", "now", {})]
    assert calls == [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["service_tier"] == "default"


@pytest.mark.parametrize("stream", [True, False])
def test_billed_usage(stream: bool) -> None:
    meter = Meter(a_call(chat(stream=stream)))
    meter.watch(chunks_of(STREAM) if stream else chat_completion(json.dumps(WHOLE).encode()))
    assert meter.complete
    assert meter.usage == BILLED
    assert meter.service_tier == "default"


def test_a_stream_that_ends_early_bills_the_prompt_as_counted_by_the_server() -> None:
    meter = Meter(a_call(chat(stream=True)))
    text = STREAM.index(b"event: content_block_start", STREAM.index(b"I look"))
    chunks = MessageStreamTranslator().feed(STREAM[:text])
    assert b'"usage"' not in meter.watch(chunks).replace(b'"warmpath":{"usage"', b"")
    assert (meter.usage.input_uncached, meter.usage.cache_read, meter.usage.cache_write) == (10, 100, 20)
    assert meter.usage.cache_write_1h == 15
    assert meter.usage.output > 1
    assert not meter.usage.exact


@pytest.mark.parametrize(
    ("counted", "billed"),
    [
        ({"input_tokens": 7, "output_tokens": 2}, Usage(input_uncached=7, output=2, exact=True)),
        (
            {"input_tokens": 0, "output_tokens": 2, "cache_creation_input_tokens": None, "cache_read_input_tokens": 9},
            Usage(cache_read=9, output=2, exact=True),
        ),
        (
            {"input_tokens": 1, "output_tokens": 2, "cache_creation": {"ephemeral_5m_input_tokens": 4}},
            Usage(input_uncached=1, cache_write=4, output=2, exact=True),
        ),
    ],
)
def test_counts_of_a_whole_message(counted: dict[str, Any], billed: Usage) -> None:
    meter = Meter(a_call())
    meter.watch(chat_completion(json.dumps(message([], counted)).encode()))
    assert meter.usage == billed


@pytest.mark.parametrize("count", [-1, 2**80, 1.5, "many", True, [1]])
@pytest.mark.parametrize("stream", [True, False])
def test_malformed_counts_fail_no_answer_and_reach_the_meter(stream: bool, count: Any) -> None:
    meter = Meter(a_call(chat(stream=stream)))
    counted = {"input_tokens": count, "output_tokens": 2}
    if stream:
        text = block_start(0, type="text", text="") + block_delta(0, type="text_delta", text="hello")
        meter.watch(chunks_of(message_start(counted) + text + message_delta(output_tokens=2) + MESSAGE_STOP))
    else:
        meter.watch(chat_completion(json.dumps(message([{"type": "text", "text": "hello"}], counted)).encode()))
    assert meter.complete
    assert meter.usage == Usage(a_call(chat()).prompt_tokens_estimate, output=2), "by the bytes of the text"
    assert meter.implausible is not None and '"input_tokens":' in meter.implausible


@pytest.mark.parametrize(
    ("stop_reason", "finish"),
    [
        ("end_turn", "stop"), ("stop_sequence", "stop"), ("pause_turn", "stop"), ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"), ("tool_use", "tool_calls"), ("refusal", "content_filter"),
        ("something new", "stop"),
    ],
)  # fmt: skip
def test_finish_reason(stop_reason: str, finish: str) -> None:
    whole = json.loads(chat_completion(json.dumps(message([], stop_reason=stop_reason)).encode()))
    assert whole["choices"][0]["finish_reason"] == finish
    streamed = read(chunks_of(message_start() + message_delta(stop_reason) + MESSAGE_STOP))
    assert streamed[-2]["choices"][0]["finish_reason"] == finish


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ({"input_tokens": 0, "output_tokens": 0}, {"input_tokens": 7, "cache_read_input_tokens": 5}),
        ({"input_tokens": 7, "output_tokens": 0, "cache_read_input_tokens": 5}, {"input_tokens": 0}),
        ({"input_tokens": 7, "output_tokens": 0, "cache_read_input_tokens": 5}, {}),
    ],
)
def test_the_prompt_may_be_counted_at_the_start_or_at_the_end(start: dict[str, Any], end: dict[str, Any]) -> None:
    meter = Meter(a_call(chat(stream=True)))
    meter.watch(chunks_of(message_start(start) + message_delta(**end) + MESSAGE_STOP))
    assert meter.usage == Usage(input_uncached=7, cache_read=5, output=2, exact=True)


@pytest.mark.parametrize("empty", [b"{}", b"{ }"])
def test_empty_arguments_at_the_start_of_a_call_are_ignored(empty: bytes) -> None:
    start = block_start(0, type="tool_use", id="t", name="f", input="HERE").replace(b'"HERE"', empty)
    stream = message_start() + start + block_delta(0, type="input_json_delta", partial_json='{"a": 1}') + MESSAGE_STOP
    calls = joined_deltas(read(chunks_of(stream)))["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}]


def test_arguments_may_be_at_the_start_of_a_call() -> None:
    """Some compatible servers send them there."""
    start = block_start(0, type="tool_use", id="t", name="f", input={"a": 1}) + block_stop(0)
    calls = joined_deltas(read(chunks_of(message_start() + start + MESSAGE_STOP)))["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}]


def test_unknown_events_and_blocks_are_ignored() -> None:
    new = (
        event(type="something_new") + block_start(0, type="server_thing", x=1) + block_delta(0, type="thing_delta", y=2)
    )
    assert chunks_of(message_start() + new + MESSAGE_STOP) == chunks_of(message_start() + MESSAGE_STOP)


@pytest.mark.parametrize(
    "stream",
    [
        block_delta(0, type="text_delta", text="no beginning"),
        MESSAGE_STOP,
        b"data: {\n\n",
        b'data: {"type": "message_start", "message": {"id": 3}}\n\n',
    ],
)
def test_a_malformed_stream_is_rejected(stream: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        MessageStreamTranslator().feed(stream)


@pytest.mark.parametrize("body", [b"{}", b'{"type": "message"}', b'{"choices": []}', pytest.param(DEEP, id="too deep")])
def test_a_malformed_message_is_rejected(body: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        chat_completion(body)


def test_an_error_ends_the_stream() -> None:
    translator = MessageStreamTranslator()
    error = event(**messages_error("overloaded_error", "Overloaded"))
    chunks = translator.feed(message_start() + error + MESSAGE_STOP)
    assert (translator.failure, translator.ended) == ("overloaded_error: Overloaded", False)
    assert b"[DONE]" not in chunks


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("prompt is too long: 300000 tokens > 200000 maximum", "context_length_exceeded"),
        ("max_tokens: too large", None),
    ],
)
def test_errors_are_translated_to_openai_s_form(text: str, code: str | None) -> None:
    error = json.loads(openai_error(json.dumps(messages_error("invalid_request_error", text)).encode()))
    assert error == {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]"])
def test_another_error_body_is_unchanged(body: bytes) -> None:
    assert openai_error(body) == body
