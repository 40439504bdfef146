"""What the doors of other wires read of a chat's answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.core.errors import UpstreamCut
from gateway.endpoints.chat_answers import Answer, Said, ThinkingBlock, read_answer


def answer(**fields: Any) -> Answer:
    return read_answer(msgspec.json.encode(fields))


def test_a_thought_has_either_name() -> None:
    assert Said(reasoning_content="Hm.", reasoning="other").thought == "Hm."
    assert Said(reasoning_content="", reasoning="Hm.").thought == "Hm."
    assert Said(reasoning={"steps": 3}).thought == ""
    assert not Said(content="x").thinks and Said(thinking_blocks=[ThinkingBlock(data="x")]).thinks


def test_the_message_is_that_of_the_first_choice() -> None:
    choices = [{"index": 1, "message": {"content": "b"}}, {"index": 0, "message": {"content": "a"}}]
    assert answer(choices=choices).message[1].content == "a"
    for none in ({}, {"choices": None}, {"choices": [{"delta": {"content": "a"}}]}, {"choices": choices[:1]}):
        with pytest.raises(UpstreamCut):
            _ = answer(**none).message


@pytest.mark.parametrize(
    ("usage", "tokens"), [({"prompt_tokens": "3"}, 3), ({"prompt_tokens": "x"}, None), (None, None)]
)
def test_counts_that_are_none_are_not_told(usage: Any, tokens: int | None) -> None:
    counts = answer(usage=usage).counts
    assert (counts.prompt_tokens if counts is not None else None) == tokens


@pytest.mark.parametrize("data", [b"", b"[]", b'{"choices":5}', b'{"choices":[{"delta":{"content":5}}]}'])
def test_what_is_no_answer_is_not_read(data: bytes) -> None:
    with pytest.raises(UpstreamCut):
        read_answer(data)


def test_content_may_come_in_parts() -> None:
    """As Mistral's models that reason give theirs."""
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}, {"type": "text", "text": "."}]}
    parts = [thinking, {"type": "text", "text": "It is "}, {"type": "reference", "reference_ids": [1]}]
    parts.append({"type": "text", "text": "sunny."})
    for name in ("message", "delta"):
        told = answer(model="m", choices=[{"index": 0, name: {"content": parts}, "finish_reason": "stop"}])
        assert told.choices is not None
        (choice,) = told.choices
        said = choice.message or choice.delta
        assert said is not None and (said.thought, said.content) == ("Hm.", "It is sunny.")
        assert (told.model, choice.finish_reason) == ("m", "stop")
    for content in (["text"], [{"text": "x"}], 5, [{"type": "text", "text": 5}]):
        with pytest.raises(UpstreamCut):
            answer(choices=[{"message": {"content": content}}])
