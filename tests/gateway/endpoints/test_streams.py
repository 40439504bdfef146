"""Whatever a deployment streams, and in whatever chunks it arrives, clients get well-formed events, and the usage in
them is what is billed.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.endpoints.base import Endpoint
from gateway.endpoints.messages import MessagesEndpoint
from gateway.endpoints.responses import ResponsesEndpoint
from gateway.types import Usage
from tests.gateway.endpoints.messages import test_reply as messages
from tests.gateway.endpoints.relayed import Relayed, cut_at, relayed
from tests.gateway.endpoints.responses import translated as responses

_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDPOINTS = (MessagesEndpoint(), ResponsesEndpoint())
BODIES: dict[str, dict[str, Any]] = {
    "messages": {
        "model": "m", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
    "responses": {
        "model": "m", "stream": True, "input": "hi",
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    },
}  # fmt: skip
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 2},
}  # fmt: skip
DONE = b"data: [DONE]\n\n"


def choice(delta: dict[str, Any] | None, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def tool_call(index: int | None, call_id: str | None, name: str | None, arguments: str | None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}


def through(endpoint: Endpoint, pieces: list[bytes]) -> Relayed:
    return relayed(endpoint, BODIES[endpoint.path], pieces)


def check(endpoint: Endpoint, result: Relayed) -> bool:
    """Check the events, and return whether the answer is complete. An incomplete one must not look complete."""
    if endpoint.path == "messages":
        return check_message(messages.parsed(result.content), result.usage)
    return check_response(responses.events_of(result.content), result.usage)


def check_message(events: list[Any], usage: Usage) -> bool:
    kinds, open_block, begun = [event["type"] for event in events], None, 0
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (None, begun)
                open_block, begun = begun, begun + 1
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    if kinds[-1] == "error":
        assert "message_stop" not in kinds
        return False
    assert kinds[-2:] == ["message_delta", "message_stop"] and open_block is None
    message_usage = messages.folded(events).usage
    if usage.exact:
        assert (message_usage.input_tokens, message_usage.cache_read_input_tokens) == (
            usage.input_uncached,
            usage.cache_read,
        )
        assert message_usage.output_tokens == usage.output
    return True


def check_response(events: list[Any], usage: Usage) -> bool:
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:  # OpenAI's client folds them, and checks their order
        state.handle_event(_event.validate_python(event))
    last = events[-1]["response"]
    assert events[0]["type"] == "response.created" and events[-1]["type"] == f"response.{last['status']}"
    if last["status"] == "failed":
        return False
    assert responses.folded(events) == last["output"]
    if usage.exact:
        assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (usage.input, usage.output)
        assert last["usage"]["input_tokens_details"]["cached_tokens"] == usage.cache_read
    return True


RICH = b"".join(
    style % json.dumps({"id": "c", "model": "served", **event}, ensure_ascii=False).encode()
    for style, event in (
        (b"data: %b\n\n", choice({"role": "assistant", "content": ""})),
        (b": keep-alive\r\n\r\ndata: %b\r\n\r\n", choice({"reasoning_content": "日本\U0001f600"})),
        (b"event: x\ndata: %b\n\n", choice({"content": "data: [DONE]\n\n"})),
        (b"data:%b\n\n", choice({"content": 'é "error"', "tool_calls": None})),
        (b"data: %b\n\n", choice({"content": "other"}, index=1)),
        (b"data: %b\n\n", choice(tool_call(0, "c0", "look", ""))),
        (b"data: %b\n\n", choice(tool_call(1, "c1", "look", '{"b":'))),
        (b"id: 7\ndata: %b\n\n", choice(tool_call(0, None, None, '{"a":"ü"}'))),
        (b"data: %b\n\n", choice(tool_call(1, "c1", None, "1}"), "tool_calls")),
        (b"data: %b\n\n", {"choices": [], "usage": USAGE}),
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_events_do_not_depend_on_chunk_boundaries(endpoint: Endpoint) -> None:
    stream = RICH + DONE
    whole = through(endpoint, [stream])
    assert check(endpoint, whole) and whole.usage.exact
    for offset in range(1, len(stream)):
        assert through(endpoint, cut_at(stream, [offset])) == whole
    assert through(endpoint, cut_at(stream, range(len(stream)))) == whole


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
@pytest.mark.parametrize("end", [b"", b"data: {\n\n", b'data: {"error": {"message": "out of memory"}}\n\n'])
def test_a_stream_cut_anywhere_never_looks_complete(endpoint: Endpoint, end: bytes) -> None:
    frames = RICH.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
    for count in range(len(frames) + 1):
        assert not check(endpoint, through(endpoint, [b"\n\n".join([*frames[:count], end])]))


text = st.text(max_size=6) | st.sampled_from(("日本語", "\U0001f600" * 3, DONE.decode(), '"error"', "\r\n", "\x85"))
arguments = st.sampled_from(("", None, "{}", '{"a":1}', '{"a":'))
deltas = st.one_of(
    st.builds(lambda content: {"content": content}, text | st.none()),
    st.builds(lambda name, value: {name: value}, st.sampled_from(("reasoning", "reasoning_content", "refusal")), text),
    st.builds(
        lambda index, call_id, name, piece: tool_call(index, call_id, name, piece),
        st.sampled_from((0, 0, 1, None)), st.sampled_from(("c0", "c1", None, "")), st.sampled_from(("look", None)),
        arguments,
    ),
    st.sampled_from(({}, None, {"role": "assistant", "content": None, "tool_calls": []})),
)  # fmt: skip
events = st.one_of(
    st.builds(
        lambda delta, finish, usage: choice(delta, finish) | usage,
        deltas,
        st.sampled_from((None, None, None, "stop", "tool_calls", "length", "content_filter", "abort")),
        st.sampled_from(({}, {}, {"usage": None}, {"usage": USAGE})),
    ),
    st.builds(lambda delta: choice(delta, index=1), deltas),
    st.sampled_from(({"choices": [], "usage": USAGE}, {"choices": None, "usage": None})),
)
styles = st.sampled_from((b"data: %b\n\n", b"data:%b\r\n\r\n", b"event: x\ndata: %b\n\n", b": hi\n\ndata: %b\n\n"))
ends = st.sampled_from((DONE, DONE, DONE[:-2], b"", b'data: {"error":{"message":"oom"}}\n\n', b"data: {\n\n"))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.tuples(events, styles), max_size=8), ends, st.lists(st.integers(0, 2000), max_size=8), st.booleans())
def test_any_stream_becomes_a_valid_sequence_of_events(
    stream_events: list[tuple[dict[str, Any], bytes]], end: bytes, offsets: list[int], escaped: bool
) -> None:
    stream = b"".join(
        style % json.dumps({"model": "served", **event}, ensure_ascii=escaped).encode("utf-8")
        for event, style in stream_events
    )
    for endpoint in ENDPOINTS:
        whole = through(endpoint, [stream + end])
        check(endpoint, whole)
        assert through(endpoint, cut_at(stream + end, offsets)).content == whole.content


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_calls_with_the_same_id_get_different_ids(endpoint: Endpoint) -> None:
    """Tool results refer to calls by id."""
    pieces = [tool_call(index, "c", name, piece) for name, piece in (("look", ""), (None, "{}")) for index in (0, 1)]
    result = through(endpoint, [b"data: %b\n\n" % json.dumps(choice(piece)).encode() for piece in pieces] + [DONE])
    assert check(endpoint, result)
    assert len(set(re.findall(rb'"(?:call_id|id)":"(c|call_[^"]*|toolu_[^"]*)"', result.content))) == 2
