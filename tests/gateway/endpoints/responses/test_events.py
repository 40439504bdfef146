"""Events of a streamed response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BudgetSpent, GatewayError, UpstreamCut
from tests.gateway.endpoints.responses.translated import (
    DONE,
    TOOL,
    check_events,
    check_response,
    events_of,
    folded,
    frame,
    read,
    streamed,
    usage_frame,
    whole_answer,
)
from tests.openai_spec import Validate

FIRST = frame({"role": "assistant", "content": ""})


def call(number: int, arguments: str = "", **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": number, "function": {"arguments": arguments}, **fields}]}


def first_of_call(number: int, name: str = "look") -> dict[str, Any]:
    return call(number, id=f"c{number}", type="function") | {
        "tool_calls": [{"index": number, "id": f"c{number}", "function": {"name": name, "arguments": ""}}]
    }


def kinds(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


STREAM = [
    FIRST,
    frame({"reasoning_content": "Hm."}),
    frame({"content": "Let me"}),
    frame({"content": " look."}),
    frame(first_of_call(0)),
    frame(call(0, "{}")),
    frame({}, finish_reason="tool_calls"),
    usage_frame(),
    DONE,
]


def test_the_order_of_events() -> None:
    assert kinds(streamed(STREAM)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_each_frame_is_translated_at_once() -> None:
    translator, _ = read(stream=True)
    assert kinds(events_of(translator.frames(FIRST, last=False))) == ["created", "in_progress"]
    assert translator.frames(FIRST, last=False) == b""
    assert b'"delta":"Hi"' in translator.frames(frame({"content": "Hi"}), last=False)
    assert translator.frames(b": ping\n\n", last=False) == b": keep-alive\n\n"


def test_end_events_come_only_with_done() -> None:
    translator, _ = read(stream=True)
    sent = translator.frames(b"".join(STREAM[:-1]), last=False)
    assert b"response.completed" not in sent and b"function_call_arguments.done" not in sent
    (*_, end) = events_of(sent + translator.frames(DONE, last=True))
    assert end["type"] == "response.completed" and end["response"]["usage"]["output_tokens"] == 4


def test_an_answer_cut_by_max_tokens_is_incomplete() -> None:
    (*_, item, end) = streamed([FIRST, frame({"content": "x"}, finish_reason="length"), DONE])
    assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert end["type"] == "response.incomplete"
    assert end["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_parallel_calls_may_grow_side_by_side() -> None:
    frames = [frame(first_of_call(0)), frame(first_of_call(1)), frame(call(0, "[0]")), frame(call(1, "[1]"))]
    output = folded(streamed([FIRST, *frames, DONE]))
    assert [item["arguments"] for item in output] == ["[0]", "[1]"]


def test_calls_are_told_apart_by_id_even_with_the_same_index() -> None:
    """Some engines send them so."""
    second = {"tool_calls": [{"index": 0, "id": "c9", "function": {"name": "look", "arguments": "[9]"}}]}
    frames = [frame(first_of_call(0)), frame(call(0, "[0]", id="c0")), frame(second), frame(call(0, " "))]
    output = folded(streamed([FIRST, *frames, DONE]))
    assert [(item["call_id"], item["arguments"]) for item in output] == [("c0", "[0]"), ("c9", "[9] ")]


def test_text_after_more_reasoning_is_another_item() -> None:
    deltas = [{"reasoning": "a"}, {"content": "b"}, {"reasoning": "c"}, {"content": "d"}]
    output = folded(streamed([*map(frame, deltas), DONE]))
    assert [item["type"] for item in output] == ["reasoning", "message", "reasoning", "message"]
    assert len({item["id"] for item in output}) == 4


@pytest.mark.parametrize(
    ("error", "code"),
    [(UpstreamCut("the server went away"), "server_error"), (BudgetSpent("no more"), "rate_limit_exceeded")],
)
@pytest.mark.parametrize("frames", [STREAM[:1], STREAM[:3], STREAM[:6], []])
def test_a_failed_stream_ends_with_response_failed(
    error: GatewayError, code: str, frames: list[bytes], validate: Validate
) -> None:
    translator, _ = read(stream=True, tools=[TOOL])
    before = b"".join(translator.frames(one, last=False) for one in frames)
    events = events_of(before + translator.error_frames(error))
    assert kinds(events)[0] == "created" and kinds(events)[-1] == "failed"
    assert "completed" not in kinds(events)
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]) == ("failed", {"code": code, "message": error.message})
    assert all(item["status"] != "in_progress" for item in failed["output"])
    done = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert "function_call" not in done  # an agent must not execute it with half of its arguments
    check_events(validate, events)


@pytest.mark.parametrize("chunk", [b"data: {\n\n", frame({"content": 5}), frame(call(0, "{}"))])
def test_an_invalid_frame_raises_upstream_cut(chunk: bytes) -> None:
    translator, _ = read(stream=True)
    translator.frames(FIRST, last=False)
    with pytest.raises(UpstreamCut):
        translator.frames(chunk, last=False)


@pytest.mark.parametrize("ending", [frame({"content": 5}), frame({}, finish_reason="abort") + DONE])
def test_events_before_an_invalid_frame_precede_the_error(ending: bytes) -> None:
    translator, _ = read(stream=True)
    with pytest.raises(UpstreamCut):
        translator.frames(FIRST + frame({"content": "Hi"}) + ending, last=ending.endswith(DONE))
    events = events_of(translator.error_frames(UpstreamCut("no")))
    assert kinds(events)[:2] == ["created", "in_progress"] and kinds(events)[-1] == "failed"
    assert "output_text.delta" in kinds(events)


def test_the_buffered_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.endpoints.responses.output.MAX_ANSWER_PIECES", 11)
    translator, _ = read(stream=True)
    translator.frames(frame({"content": "12345"}) + frame(call(0, "67") | first_of_call(0)), last=False)
    with pytest.raises(UpstreamCut):
        translator.frames(frame({"reasoning_content": "67890"}), last=False)


def test_an_aborted_answer_is_not_completed() -> None:
    with pytest.raises(UpstreamCut):
        streamed([FIRST, frame({}, finish_reason="abort"), DONE])


@pytest.mark.parametrize("text", ["", "a", "Hello, world.", "ü" * 40])
def test_padding_hides_the_length_of_deltas(text: str) -> None:
    options = {"include_obfuscation": True}
    chunks = [FIRST, frame({"content": "x" + text}), DONE]
    (delta,) = [event for event in streamed(chunks, stream_options=options) if "delta" in event]
    assert (len(delta["delta"]) + len(delta["obfuscation"])) % 32 == 0
    assert all("obfuscation" not in event for event in streamed(chunks))


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content", "message.output_text.logprobs"]])
def test_events_match_openais_specification(validate: Validate, include: list[str]) -> None:
    tokens = {"content": [{"token": "x", "logprob": -1, "top_logprobs": [{"token": "x", "logprob": -1}]}]}
    refusal = [frame({"content": "No", "refusal": "."}, logprobs=tokens)]
    for chunks in (STREAM, [FIRST, *refusal, DONE], [frame({"content": "x"}, finish_reason="length"), DONE], [DONE]):
        events = streamed(chunks, include=include, tools=[TOOL], stream_options={"include_obfuscation": True})
        check_events(validate, events)
        check_response(validate, events[-1]["response"])


# Random answers in random pieces


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    text = st.text(min_size=1, max_size=12)
    message: dict[str, Any] = {"content": draw(text | st.just(""))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(text)
    if draw(st.booleans()):
        message["thinking_blocks"] = [
            {"type": "thinking", "thinking": message.get("reasoning_content", ""), "signature": draw(text)},
            {"type": "redacted_thinking", "data": draw(text)},
        ]
    if draw(st.booleans()):
        message["refusal"] = draw(text)
    calls = draw(st.lists(st.text("{}:1, ", max_size=8), max_size=3))
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": arguments}}
            for i, arguments in enumerate(calls)
        ]
    return message


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def streams(draw: st.DrawFn, message: dict[str, Any], finish_reason: str) -> list[bytes]:
    """The same answer in pieces, which are joined to chunks at random; pieces of different calls are interleaved."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(draw, message.get("reasoning_content") or "")]
    deltas += [
        {"thinking_blocks": [{"index": index, name: piece}]}
        for index, block in enumerate(message.get("thinking_blocks", []))
        for name, value in block.items()
        for piece in ([value] if name == "type" else pieces(draw, value))
    ]
    for name in ("content", "refusal"):
        deltas += [{name: piece} for piece in pieces(draw, message.get(name) or "")]
    calls = message.get("tool_calls", [])
    deltas += [first_of_call(i) for i in range(len(calls))]
    growing = [(i, piece) for i, one in enumerate(calls) for piece in pieces(draw, one["function"]["arguments"])]
    order = draw(st.permutations([i for i, _ in growing]))
    queues = {i: [piece for one, piece in growing if one == i] for i in range(len(calls))}
    deltas += [call(i, queues[i].pop(0)) for i in order]
    frames = [*map(frame, deltas), frame({}, finish_reason=finish_reason), usage_frame(), DONE]
    chunks: list[bytes] = []
    for one in frames:
        if len(chunks) > 0 and draw(st.booleans()):
            chunks[-1] += one
        else:
            chunks.append(one)
    return chunks


@given(st.data(), answers(), st.sampled_from(["stop", "length", "content_filter"]))
def test_events_add_up_to_the_whole_answer(data: st.DataObject, message: Any, finish_reason: str) -> None:
    fields: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "tools": [TOOL]}
    whole = json.loads(read(**fields)[0].answer(whole_answer(message, finish_reason)))
    events = streamed(data.draw(streams(message, finish_reason)), **fields)
    assert folded(events) == whole["output"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    untimed = {"created_at": 0, "completed_at": 0}
    assert {**last, **untimed} == {**whole, **untimed}


@given(st.data(), st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=6))
def test_log_probabilities_of_events_add_up_to_those_of_the_whole_answer(data: st.DataObject, texts: list[str]) -> None:
    tokens = [{"token": text, "logprob": -1.0, "bytes": [*text.encode()], "top_logprobs": []} for text in texts]
    fields = {"include": ["message.output_text.logprobs"]}
    answer = whole_answer({"content": "".join(texts)}, logprobs={"content": [*tokens, tokens[0]]})
    whole = json.loads(read(**fields)[0].answer(answer))
    held: str = ""
    frames = []
    for text, token in zip([*texts, ""], [*tokens, tokens[0]], strict=True):
        held += text
        late = data.draw(st.booleans()) and text != texts[-1]  # its text comes together with that of a later token
        frames.append(frame({"content": "" if late else held}, logprobs={"content": [token]}))
        held = held if late else ""
    if held:
        frames.append(frame({"content": held}))
    assert folded(streamed([*frames, frame({}, finish_reason="stop"), DONE], **fields)) == whole["output"]
