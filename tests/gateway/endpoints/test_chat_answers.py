"""Decoding a chat's answer for translation to another wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.core.errors import UpstreamCut
from gateway.endpoints.chat_answers import AssistantMessage, ChatAnswer, ChatThinkingBlock, read_answer


def answer(**fields: Any) -> ChatAnswer:
    return read_answer(msgspec.json.encode(fields))


def test_reasoning_is_read_under_either_name() -> None:
    assert AssistantMessage(reasoning_content="Hm.", reasoning="other").reasoning_text == "Hm."
    assert AssistantMessage(reasoning_content="", reasoning="Hm.").reasoning_text == "Hm."
    assert AssistantMessage(reasoning={"steps": 3}).reasoning_text == ""
    assert not AssistantMessage(content="x").has_reasoning
    assert AssistantMessage(thinking_blocks=[ChatThinkingBlock(data="x")]).has_reasoning


def test_message_returns_the_choice_with_index_0() -> None:
    choices = [{"index": 1, "message": {"content": "b"}}, {"index": 0, "message": {"content": "a"}}]
    assert answer(choices=choices).message[1].content == "a"
    for none in ({}, {"choices": None}, {"choices": [{"delta": {"content": "a"}}]}, {"choices": choices[:1]}):
        with pytest.raises(UpstreamCut):
            _ = answer(**none).message


@pytest.mark.parametrize(
    ("usage", "tokens"), [({"prompt_tokens": "3"}, 3), ({"prompt_tokens": "x"}, None), (None, None)]
)
def test_invalid_usage_is_none(usage: Any, tokens: int | None) -> None:
    counts = answer(usage=usage).counts
    assert (counts.prompt_tokens if counts is not None else None) == tokens


@pytest.mark.parametrize("data", [b"", b"[]", b'{"choices":5}', b'{"choices":[{"delta":{"content":5}}]}'])
def test_an_invalid_answer_raises_upstream_cut(data: bytes) -> None:
    with pytest.raises(UpstreamCut):
        read_answer(data)


def test_content_may_be_a_list_of_parts() -> None:
    """As Mistral's reasoning models send it."""
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}, {"type": "text", "text": "."}]}
    parts = [thinking, {"type": "text", "text": "It is "}, {"type": "reference", "reference_ids": [1]}]
    parts.append({"type": "text", "text": "sunny."})
    for name in ("message", "delta"):
        parsed = answer(model="m", choices=[{"index": 0, name: {"content": parts}, "finish_reason": "stop"}])
        assert parsed.choices is not None
        (choice,) = parsed.choices
        message = choice.message or choice.delta
        assert message is not None and (message.reasoning_text, message.content) == ("Hm.", "It is sunny.")
        assert (parsed.model, choice.finish_reason) == ("m", "stop")
    for content in (["text"], [{"text": "x"}], 5, [{"type": "text", "text": 5}]):
        with pytest.raises(UpstreamCut):
            answer(choices=[{"message": {"content": content}}])
