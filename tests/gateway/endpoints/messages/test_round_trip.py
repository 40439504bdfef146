"""Anthropic's answers translated to chat and back: a client gets what Anthropic sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.endpoints.messages import MessagesEndpoint
from gateway.endpoints.messages.reply import ReplyFormat, message_of
from gateway.providers.anthropic.response import MessageStreamTranslator, chat_completion
from gateway.providers.redaction import Redactor
from gateway.providers.sse import FrameSplitter
from gateway.providers.translation import TranslatedStream
from gateway.providers.transport import HTTPResponse
from tests.gateway.endpoints.messages.test_reply import folded, parsed
from tests.gateway.endpoints.relayed import cut_at, relayed
from tests.gateway.providers.wires import (
    MESSAGE_STOP,
    block_delta,
    block_start,
    block_stop,
    event,
    message,
    message_start,
)

BODY = {"model": "m", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {
    "input_tokens": 7, "output_tokens": 1, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 10,
    "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 6},
}  # fmt: skip
OUTPUT = {"output_tokens": 17, "output_tokens_details": {"thinking_tokens": 5}}


def translated_stream(response: HTTPResponse, redactor: Redactor) -> TranslatedStream:
    return TranslatedStream(response, redactor, MessageStreamTranslator(), FrameSplitter)


Draw = Callable[..., Any]
text = st.text(min_size=1, max_size=6)
blocks = st.one_of(
    st.builds(lambda value: {"type": "text", "text": value}, text),
    st.builds(lambda value: {"type": "thinking", "thinking": value, "signature": "c2ln"}, text),
    st.just({"type": "redacted_thinking", "data": "ZGF0YQ=="}),
    st.builds(lambda given: {"type": "tool_use", "name": "look", "input": given}, st.sampled_from(({}, {"a": "é"}))),
)
ends = st.sampled_from(
    (("end_turn", None), ("max_tokens", None), ("stop_sequence", "END"), ("tool_use", None), ("refusal", None))
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[dict[str, Any]], str, str | None]:
    """Answers as models give them: no two consecutive texts, and no tool call before `end_turn`."""
    content: list[dict[str, Any]] = []
    for number, block in enumerate(draw(st.lists(blocks, max_size=4))):
        if not (block["type"] == "text" and content and content[-1]["type"] == "text"):
            content.append({**block, "id": f"toolu_{number}"} if block["type"] == "tool_use" else block)
    reason, sequence = draw(ends)
    if reason == "end_turn" and any(block["type"] == "tool_use" for block in content):
        reason = "tool_use"
    return content, reason, sequence


def split(draw: Draw, whole: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=2)))
    return [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def streamed(draw: Draw, content: list[dict[str, Any]], reason: str, sequence: str | None) -> bytes:
    events = [message_start(PROMPT)]
    for index, block in enumerate(content):
        match block["type"]:
            case "text":
                events.append(block_start(index, type="text", text=""))
                events += [block_delta(index, type="text_delta", text=one) for one in split(draw, block["text"])]
            case "thinking":
                events.append(block_start(index, type="thinking", thinking="", signature=""))
                events += [
                    block_delta(index, type="thinking_delta", thinking=one) for one in split(draw, block["thinking"])
                ]
                events.append(block_delta(index, type="signature_delta", signature=block["signature"]))
            case "tool_use":
                events.append(block_start(index, **{**block, "input": {}}))
                arguments = split(draw, json.dumps(block["input"])) if block["input"] else []
                events += [block_delta(index, type="input_json_delta", partial_json=one) for one in arguments]
            case _:
                events.append(block_start(index, **block))
        events += [block_stop(index), event(type="ping")]
    events.append(event(type="message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=OUTPUT))
    return b"".join([*events, MESSAGE_STOP])


@settings(max_examples=150)
@given(answers(), st.data(), st.lists(st.integers(0, 3000), max_size=6))
def test_a_stream_survives_both_translations(
    answer: tuple[list[dict[str, Any]], str, str | None], data: st.DataObject, offsets: list[int]
) -> None:
    stream = streamed(data.draw, *answer)
    events = parsed(relayed(MessagesEndpoint(), BODY, cut_at(stream, offsets), translated_stream).content)
    theirs, ours = folded(parsed(stream)).to_dict(), folded(events).to_dict()
    assert {**ours, "id": theirs["id"]} == theirs
    assert events[0]["message"]["usage"]["input_tokens"] == PROMPT["input_tokens"], (
        "message_start has the prompt's length"
    )


@settings(max_examples=100)
@given(answers())
def test_a_whole_answer_survives_both_translations(answer: tuple[list[dict[str, Any]], str, str | None]) -> None:
    """In a chat, all thinking comes before all text, and all text before all calls."""
    content, reason, sequence = answer
    theirs = message(content, PROMPT | OUTPUT, stop_reason=reason, stop_sequence=sequence)
    ours = json.loads(message_of(chat_completion(json.dumps(theirs).encode()), ReplyFormat("msg_1")))
    joined = "".join(block["text"] for block in content if block["type"] == "text")
    in_order = [block for block in content if "thinking" in block["type"]]
    in_order += [{"type": "text", "text": joined}] if joined else []
    assert ours["content"] == in_order + [block for block in content if block["type"] == "tool_use"]
    assert (ours["stop_reason"], ours["stop_sequence"]) == (reason, sequence)
    assert ours["usage"] == PROMPT | OUTPUT
