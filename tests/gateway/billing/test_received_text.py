"""The text of frames is the same, whether they are decoded together or one by one, and however they arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.received_text import SAMPLE_BYTES, ReceivedText, _texts, _texts_one_by_one
from gateway.providers.sse import join_objects


def frame(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunk_of(**delta: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}


call = st.builds(lambda text: [{"index": 0, "function": {"name": "f", "arguments": text}}], st.text())
events = st.one_of(
    st.builds(lambda text: chunk_of(content=text), st.text()),
    st.builds(lambda text: chunk_of(role="assistant", reasoning=text, reasoning_content=text), st.text()),
    st.builds(lambda calls: chunk_of(tool_calls=calls), call),
    st.builds(lambda text: {"choices": [{"index": 0, "text": text}], "usage": None}, st.text()),
    st.just({"choices": [], "usage": {"prompt_tokens": 3}}),
    st.just({"choices": None}),
    st.just({"choices": "none"}),
    st.just({"id": 1}),
)
frames = st.one_of(
    events.map(frame),
    st.sampled_from((b": alive\n\n", b"event: chunk\ndata: {}\n\n", b"data: [DONE]\n\n", b'data: {"choices": [}\n\n')),
)


@given(st.lists(frames))
def test_decoding_together_changes_nothing(parts: list[bytes]) -> None:
    joined = b"".join(parts)
    assert "".join(_texts(joined)) == "".join(text for part in parts for text in _texts_one_by_one(part))


@given(st.lists(events.map(frame)), st.integers(0, 10))
def test_how_frames_arrive_changes_nothing(parts: list[bytes], asked_each: int) -> None:
    alone, together = ReceivedText(), ReceivedText()
    for number, part in enumerate(parts):
        alone.add(part, 1)
        if asked_each and number % asked_each == 0:
            alone.text_bytes()
    together.add(b"".join(parts), len(parts))
    assert alone.text_bytes() == together.text_bytes() == sum(len(text.encode()) for text in _texts(b"".join(parts)))


def test_text_after_the_sample_has_the_same_share() -> None:
    received, part = ReceivedText(), frame(chunk_of(content="four"))
    count = 3 * SAMPLE_BYTES // len(part)
    for _ in range(count):
        received.add(part, 1)
    assert not received.is_whole
    assert received.text_bytes() == 4 * count


@pytest.mark.parametrize(
    "other", [b": alive\n\n", b"event: x\ndata: {}\n\n", b"data: [DONE]\n\n", b'data: {"a":\ndata: 1}\n\n']
)
def test_only_objects_on_one_line_are_joined(other: bytes) -> None:
    usual = frame({"a": 1})
    assert json.loads(join_objects(usual + usual) or b"") == [[{"a": 1}], [{"a": 1}]]
    for chunk in (other, usual + other, other + usual, usual + other + usual):
        assert join_objects(chunk) is None
