"""Anthropic's answers through both borders, in words of chat between them: a client gets what it would have got."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.endpoints.messages import MessagesEndpoint
from gateway.endpoints.messages.reply import Wording, message_of
from gateway.providers.anthropic.provider import MessageStreamResponse
from gateway.providers.anthropic.response import chat_completion
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

Draw = Callable[..., Any]
text = st.text(min_size=1, max_size=6)
blocks = st.one_of(
    st.builds(lambda said: {"type": "text", "text": said}, text),
    st.builds(lambda said: {"type": "thinking", "thinking": said, "signature": "c2ln"}, text),
    st.just({"type": "redacted_thinking", "data": "ZGF0YQ=="}),
    st.builds(lambda given: {"type": "tool_use", "name": "look", "input": given}, st.sampled_from(({}, {"a": "é"}))),
)
ends = st.sampled_from(
    (("end_turn", None), ("max_tokens", None), ("stop_sequence", "END"), ("tool_use", None), ("refusal", None))
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[dict[str, Any]], str, str | None]:
    """As a model gives them: texts do not follow each other, and who ends by itself calls no tool."""
    content: list[dict[str, Any]] = []
    for number, block in enumerate(draw(st.lists(blocks, max_size=4))):
        if not (block["type"] == "text" and content and content[-1]["type"] == "text"):
            content.append({**block, "id": f"toolu_{number}"} if block["type"] == "tool_use" else block)
    reason, sequence = draw(ends)
    if reason == "end_turn" and any(block["type"] == "tool_use" for block in content):
        reason = "tool_use"
    return content, reason, sequence


def split(draw: Draw, said: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(said)), max_size=2)))
    return [said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]


def streamed(draw: Draw, content: list[dict[str, Any]], reason: str, sequence: str | None) -> bytes:
    said = [message_start(PROMPT)]
    for index, block in enumerate(content):
        match block["type"]:
            case "text":
                said.append(block_start(index, type="text", text=""))
                said += [block_delta(index, type="text_delta", text=one) for one in split(draw, block["text"])]
            case "thinking":
                said.append(block_start(index, type="thinking", thinking="", signature=""))
                said += [
                    block_delta(index, type="thinking_delta", thinking=one) for one in split(draw, block["thinking"])
                ]
                said.append(block_delta(index, type="signature_delta", signature=block["signature"]))
            case "tool_use":
                said.append(block_start(index, **{**block, "input": {}}))
                arguments = split(draw, json.dumps(block["input"])) if block["input"] else []
                said += [block_delta(index, type="input_json_delta", partial_json=one) for one in arguments]
            case _:
                said.append(block_start(index, **block))
        said += [block_stop(index), event(type="ping")]
    said.append(event(type="message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=OUTPUT))
    return b"".join([*said, MESSAGE_STOP])


@settings(max_examples=150)
@given(answers(), st.data(), st.lists(st.integers(0, 3000), max_size=6))
def test_a_stream_comes_through_both_borders_as_it_was(
    answer: tuple[list[dict[str, Any]], str, str | None], data: st.DataObject, places: list[int]
) -> None:
    stream = streamed(data.draw, *answer)
    told = parsed(relayed(MessagesEndpoint(), BODY, cut_at(stream, places), MessageStreamResponse).content)
    theirs, ours = folded(parsed(stream)).to_dict(), folded(told).to_dict()
    assert {**ours, "id": theirs["id"]} == theirs
    assert told[0]["message"]["usage"]["input_tokens"] == PROMPT["input_tokens"], "its beginning says how long it is"


@settings(max_examples=100)
@given(answers())
def test_a_whole_answer_comes_through_them_too(answer: tuple[list[dict[str, Any]], str, str | None]) -> None:
    """A chat has all thoughts before all text, and that before all calls."""
    content, reason, sequence = answer
    theirs = message(content, PROMPT | OUTPUT, stop_reason=reason, stop_sequence=sequence)
    ours = json.loads(message_of(chat_completion(json.dumps(theirs).encode()), Wording("msg_1")))
    said = "".join(block["text"] for block in content if block["type"] == "text")
    in_order = [block for block in content if "thinking" in block["type"]]
    in_order += [{"type": "text", "text": said}] if said else []
    assert ours["content"] == in_order + [block for block in content if block["type"] == "tool_use"]
    assert (ours["stop_reason"], ours["stop_sequence"]) == (reason, sequence)
    assert ours["usage"] == PROMPT | OUTPUT
