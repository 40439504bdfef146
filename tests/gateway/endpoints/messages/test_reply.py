"""A chat's answer in Anthropic's format: whole, and folded from any of its streams by Anthropic's own client."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.core.errors import UpstreamCut
from gateway.endpoints.messages import MessagesTranslator
from gateway.endpoints.messages.reply import PING, MessageEvents, ReplyFormat, message_of
from gateway.prompts.reader import read_fields

FORMAT = ReplyFormat("msg_1")
_event: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
DONE = b"data: [DONE]\n\n"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
COUNTS = {
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def answer(message: dict[str, Any], finish: str | None = "stop", **choice: Any) -> bytes:
    choices = [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **choice}]
    return json.dumps({"id": "c", "model": "served", "choices": choices, "usage": COUNTS}).encode()


def whole(message: dict[str, Any], finish: str | None = "stop", form: ReplyFormat = FORMAT, **choice: Any) -> Message:
    """Parse strictly, with every field that the client's type requires."""
    return Message.model_validate_json(message_of(answer(message, finish, **choice), form), strict=False)


def frame(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"id": "c", "model": "served", "choices": choices, **more}).encode() + b"\n\n"


def parsed(stream: bytes) -> list[Any]:
    found = []
    for part in stream.split(b"\n\n")[:-1]:
        name, data = part.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def folded(events: list[Any]) -> Message:
    """Fold events into a message, as the client's streaming helper does."""
    snapshot: Any = None
    bufs: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "ping":
            snapshot = accumulate_event(event=_event.validate_python(event), current_snapshot=snapshot, json_bufs=bufs)
    return Message.model_validate(snapshot.to_dict())


def streamed(frames: list[bytes], form: ReplyFormat = FORMAT) -> list[Any]:
    events = MessageEvents(form)
    return parsed(b"".join(events.frames(one, last=one is frames[-1]) for one in frames))


def test_a_whole_answer() -> None:
    message = whole({"content": "Hello.", "reasoning_content": "Greet.", "reasoning": "Greet."})
    assert message.model_dump(exclude_none=True) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "served",
        "content": [
            {"type": "thinking", "thinking": "Greet.", "signature": ""},
            {"type": "text", "text": "Hello."},
        ],
        "stop_reason": "end_turn",
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 8,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    ("finish", "message", "choice", "expected"),
    [
        ("stop", {"content": "x"}, {}, ("end_turn", None)),
        (None, {"content": "x"}, {}, ("end_turn", None)),
        ("length", {"content": "x"}, {}, ("max_tokens", None)),
        ("stop", {"content": "x"}, {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"content": "x"}, {"stop_reason": 151645}, ("end_turn", None)),
        ("tool_calls", {"tool_calls": [{"id": "c", "function": {"name": "n"}}]}, {}, ("tool_use", None)),
        ("stop", {"tool_calls": [{"id": "c", "function": {"name": "n"}}]}, {}, ("tool_use", None)),
        ("content_filter", {"content": ""}, {}, ("refusal", None)),
        ("stop", {"content": None, "refusal": "I will not."}, {}, ("refusal", None)),
    ],
)
def test_the_reason_why_the_answer_ended(
    finish: str | None, message: dict[str, Any], choice: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    result = whole(message, finish, **choice)
    assert (result.stop_reason, result.stop_sequence) == expected


@pytest.mark.parametrize("finish", ["abort", "error", "insufficient_system_resource"])
def test_an_invalid_finish_reason_is_an_error(finish: str) -> None:
    with pytest.raises(UpstreamCut, match=finish):
        whole({"content": "x"}, finish)
    with pytest.raises(UpstreamCut, match=finish):
        streamed([frame({"content": "x"}, finish), DONE])


def test_cache_writes_are_reported_by_ttl() -> None:
    counts = {
        "prompt_tokens": 10,
        "completion_tokens": 1,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 5},
        "cache_creation": {"ephemeral_5m_input_tokens": 1, "ephemeral_1h_input_tokens": 4},
    }
    body = json.dumps({"model": "m", "choices": [{"message": {"content": "x"}}], "usage": counts}).encode()
    usage = json.loads(message_of(body, FORMAT))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (3, 2, 5)
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 1, "ephemeral_1h_input_tokens": 4}


def test_tool_calls_become_tool_use_blocks() -> None:
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        {"type": "function", "function": {"name": "cut", "arguments": '{"ci'}},
        {"id": "call_4", "type": "function", "function": {"name": "deep", "arguments": DEEP}},
    ]
    result = whole({"content": None, "tool_calls": calls}, "tool_calls")
    assert [block.to_dict() for block in result.content] == [
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
        {"type": "tool_use", "id": "toolu_msg_1_2", "name": "cut", "input": {"INVALID_JSON": '{"ci'}},
        {"type": "tool_use", "id": "call_4", "name": "deep", "input": {"INVALID_JSON": DEEP}},
    ]


def test_thinking_is_omitted_if_the_client_does_not_want_it() -> None:
    hidden = ReplyFormat("msg_1", shows_thinking=False)
    assert [block.type for block in whole({"content": "x", "reasoning": "y"}, form=hidden).content] == ["text"]
    events = streamed([frame({"reasoning": "y"}), frame({"content": "x"}, "stop"), DONE], hidden)
    assert [block.type for block in folded(events).content] == ["text"]


@pytest.mark.parametrize("shown", [True, False])
def test_signed_thinking_keeps_its_signatures(shown: bool) -> None:
    thinking = [
        {"type": "thinking", "thinking": "Look.", "signature": "s1"},
        {"type": "redacted_thinking", "data": "d"},
        {"type": "thinking", "thinking": "Again.", "signature": "s2"},
    ]
    form = ReplyFormat("msg_1", shows_thinking=shown)
    message = {"content": "x", "reasoning_content": "Look.Again.", "thinking_blocks": thinking}
    deltas: list[dict[str, Any]] = [
        {"thinking_blocks": [{"index": 0, "type": "thinking", "thinking": "", "signature": ""}]},
        {"reasoning_content": "Look.", "thinking_blocks": [{"index": 0, "thinking": "Look."}]},
        {"thinking_blocks": [{"index": 0, "signature": "s1"}]},
        {"thinking_blocks": [{"index": 1, **thinking[1]}]},
        {"reasoning_content": "Again.", "thinking_blocks": [{"index": 2, **thinking[2]}]},
        {"content": "x"},
    ]
    result = whole(message, form=form)
    assert folded(streamed([*map(frame, deltas), frame({}, "stop"), frame(None, usage=COUNTS), DONE], form)) == result
    content = [block.to_dict() for block in result.content]
    hidden = [{**block, "thinking": ""} if "thinking" in block else block for block in thinking]
    assert content == [*(thinking if shown else hidden), {"type": "text", "text": "x"}]


def test_the_order_of_stream_events() -> None:
    chunks = [
        frame({"role": "assistant", "content": ""}),
        b": a comment that keeps the connection open\n\n",
        frame({"reasoning_content": "Look."}),
        frame({"content": "Let me"}) + frame({"content": " look."}),
        frame({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]}),
        frame({"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]}),
        frame({"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]}),
        frame({}, "tool_calls"),
        frame(None, usage=COUNTS),
        DONE,
    ]
    events = streamed(chunks)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["input_tokens"] == started["usage"]["output_tokens"] == 0
    assert [event["index"] for event in events if "index" in event] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    usage = events[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 8, 5)


def test_message_start_has_the_usage_of_the_first_chunk() -> None:
    counted = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    (start, *_) = streamed([frame({"content": "x"}, usage=counted), frame({}, "stop"), frame(None, usage=COUNTS), DONE])
    assert (start["message"]["usage"]["input_tokens"], start["message"]["usage"]["output_tokens"]) == (12, 1)


def test_a_stream_without_done_gets_no_end_events() -> None:
    """The connection to the deployment may break after the last token."""
    events = MessageEvents(FORMAT)
    result = events.frames(frame({"content": "x"}) + frame({}, "stop") + frame(None, usage=COUNTS), last=False)
    assert [event["type"] for event in parsed(result)] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
    ]


def test_an_invalid_answer_is_an_error() -> None:
    for body in (b"{}", b'{"choices": []}', b'{"choices": [{"delta": {}}]}'):
        with pytest.raises(UpstreamCut, match="no message"):
            message_of(body, FORMAT)
    for body in (b"not JSON", b"[]", b'{"choices": [{"message": {"content": ["parts"]}}]}'):
        with pytest.raises(UpstreamCut):
            message_of(body, FORMAT)
        with pytest.raises(UpstreamCut):
            MessageEvents(FORMAT).frames(b"data: " + body.replace(b"message", b"delta") + b"\n\n", last=False)


def piece(index: int, arguments: str) -> bytes:
    return frame({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})


def test_parallel_calls_become_consecutive_blocks() -> None:
    calls = [{"index": i, "id": f"c{i}", "function": {"name": "n", "arguments": ""}} for i in range(3)]
    events = MessageEvents(FORMAT)
    events_by_chunk = [
        [event["type"].removeprefix("content_block_") for event in parsed(events.frames(chunk, last=False))]
        for chunk in (
            frame({"tool_calls": calls}),
            piece(1, '{"b":1}'),
            piece(0, '{"a"'),
            piece(0, ":0}"),
            piece(2, "{"),
        )
    ]
    assert events_by_chunk == [
        ["message_start", "start"],
        [],
        ["delta"],
        ["delta", "stop", "start", "delta", "stop", "start"],
        ["delta"],
    ]
    with pytest.raises(UpstreamCut):
        events.frames(piece(0, "]"), last=False)


any_arguments = st.recursive(
    st.text(st.sampled_from('a"\\{}[]é')) | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(st.sampled_from('"\\}'), max_size=2), inner),
    max_leaves=4,
).map(lambda value: {"a": value})


@given(any_arguments, st.data())
def test_a_call_ends_where_its_json_ends(value: dict[str, Any], data: st.DataObject) -> None:
    result = json.dumps(value, ensure_ascii=False)
    cuts = sorted({0, len(result), *data.draw(st.lists(st.integers(0, len(result)), max_size=4))})
    calls = [{"index": i, "id": f"c{i}", "function": {"name": "n", "arguments": ""}} for i in range(2)]
    events = MessageEvents(FORMAT)
    events.frames(frame({"tool_calls": calls}), last=False)
    for begin, end in pairwise(cuts):
        new = parsed(events.frames(piece(0, result[begin:end]), last=False))
        assert [event["type"] for event in new[1:]] == (
            ["content_block_stop", "content_block_start"] if end == len(result) else []
        )


def test_buffered_arguments_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.endpoints.messages.reply.MAX_HELD_CHARACTERS", 9)
    call = {"index": 0, "id": "c", "function": {"name": "n", "arguments": '{"a":1}'}}
    events = MessageEvents(FORMAT)
    for number in range(3):  # calls that follow each other are not buffered
        events.frames(frame({"tool_calls": [{**call, "id": f"c{number}"}]}), last=False)
    with pytest.raises(UpstreamCut):
        events.frames(piece(0, "   "), last=False)


@pytest.mark.parametrize("function", [None, {}, {"name": ""}, {"name": None, "arguments": "{}"}])
def test_a_call_without_a_tool_name_is_an_error(function: Any) -> None:
    call = {"id": "c", "type": "function", "function": function}
    with pytest.raises(UpstreamCut, match="without a name"):
        whole({"tool_calls": [call]}, "tool_calls")
    with pytest.raises(UpstreamCut, match="without a name"):
        streamed([frame({"tool_calls": [{"index": 0, **call}]}), DONE])


def test_events_before_an_invalid_frame_precede_the_error() -> None:
    body = json.dumps({"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]})
    for ending in (frame({"content": 5}), frame({}, "abort") + DONE):
        translator = MessagesTranslator("req_1")
        translator.read(read_fields(body.encode()), body.encode())
        with pytest.raises(UpstreamCut):
            translator.frames(frame({"content": "x"}) + ending, last=ending.endswith(DONE))
        kinds = [event["type"] for event in parsed(translator.error_frames(UpstreamCut("no")))]
        assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"] and kinds[-1] == "error"


def test_calls_with_the_same_index_are_told_apart_by_id() -> None:
    calls = [{"index": None, "id": f"c{i}", "function": {"name": "n", "arguments": f'{{"i":{i}}}'}} for i in (0, 1)]
    result = folded(streamed([*(frame({"tool_calls": [call]}) for call in calls), frame({}, "tool_calls"), DONE]))
    assert [(block.id, block.input) for block in result.content if block.type == "tool_use"] == [
        ("c0", {"i": 0}),
        ("c1", {"i": 1}),
    ]


def test_lines_may_end_with_crlf() -> None:
    plain = frame({"content": "x"}) + b": comment\n\n" + frame({}, "stop") + DONE
    once = MessageEvents(FORMAT).frames(plain, last=True)
    assert MessageEvents(FORMAT).frames(plain.replace(b"\n", b"\r\n"), last=True) == once
    assert once.count(PING) == 1


text = st.text(min_size=1, max_size=12)
arguments = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6) | st.none(), max_size=3)
finishes = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    message: dict[str, Any] = {"content": draw(st.none() | text), "reasoning_content": draw(st.none() | text)}
    calls = draw(st.lists(st.tuples(text, arguments), max_size=3))
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for i, (name, given) in enumerate(calls)
        ]
    return message, draw(finishes)


def pieces(draw: Any, result: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(result)), max_size=3)))
    return [result[start:end] for start, end in zip([0, *cuts], [*cuts, len(result)], strict=True)]


@given(answers(), st.data())
def test_any_stream_of_an_answer_folds_into_the_whole_answer(
    answered: tuple[dict[str, Any], str], data: st.DataObject
) -> None:
    message, finish = answered
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in pieces(data.draw, message[name] or "")]
    growing: list[list[dict[str, Any]]] = []
    for i, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        head = {"index": i, **call, "function": {"name": function["name"], "arguments": ""}}
        rest = [{"index": i, "function": {"arguments": p}} for p in pieces(data.draw, function["arguments"])]
        growing.append([{"tool_calls": [part]} for part in (head, *rest)])
    if data.draw(st.booleans()):  # one after the other, as most servers do it
        deltas += [delta for call in growing for delta in call]
    else:
        deltas += [call.pop(0) for call in growing]
        turns = data.draw(st.permutations([i for i, call in enumerate(growing) for _ in call]))
        deltas += [growing[i].pop(0) for i in turns]
    frames = [*map(frame, deltas), frame({}, finish), frame(None, usage=COUNTS), DONE]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=6)))
    chunks = [b"".join(frames[a:b]) for a, b in zip([0, *cuts], [*cuts, len(frames)], strict=True)]
    assert folded(streamed([chunk for chunk in chunks if chunk])) == whole(message, finish)
