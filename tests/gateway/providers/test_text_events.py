"""Events that differ from an earlier one only in their text, recognised without parsing them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.redaction import NOTHING_SECRET
from gateway.providers.responses import EventStreamResponse
from gateway.providers.sse import are_object_events, count_events
from gateway.providers.text_events import LEARNED_MAX, TextEvents, TextSink
from gateway.providers.transport import HTTPResponse
from tests.gateway.endpoints.relayed import ScriptedBody, cut_at


def event(text: str, *, compact: bool = False, ascii_only: bool = True, **more: Any) -> bytes:
    value = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None}], **more}
    separators = (",", ":") if compact else None
    return b"data: " + json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode() + b"\n\n"


def learned(example: bytes) -> TextEvents:
    texts = TextEvents()
    texts.learn(example)
    return texts


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("text", [" the", "a", "", 'say "hi"\n', "C:\\temp\t", "/", "[DONE]", '"usage":{', "é 漢字 🙂"])
def test_an_event_with_another_text_is_recognised(text: str, compact: bool) -> None:
    texts = learned(event("first", compact=compact))
    assert texts.count(event(text, compact=compact, ascii_only=False)) == 1


def test_events_that_arrive_together_are_counted() -> None:
    texts = learned(event("first") + event("second"))
    assert texts.count(event(" a") + event("") + event(" b")) == 3
    assert texts.count(event("\n\\") + event("é", ascii_only=False)) == 2


@pytest.mark.parametrize(
    "frames",
    [
        b"",
        b"data: [DONE]\n\n",
        event("a")[:-1],
        event("a") + b": ping\n\n",
        event("a") + event("b", usage={"prompt_tokens": 1}),
        event("a", finish_reason="stop"),
        event("a").replace(b'"a"', b'"a", "b": "c"'),
        event("a").replace(b'"a"', b'"\\"'),  # the text's end is escaped
        event("a") + event("").replace(b'""', b'"'),  # the text is not closed
        event("a") + event("b").replace(b'"b"', b'"b\\"'),
        event("a").replace(b'"a"', b'"\x01"'),
        event("a").replace(b'"a"', b'"\xff"'),
        event("a").replace(b'"a"', b'"\\x"'),
        event("a").replace(b'"a"', b'"\n"'),
    ],
)
def test_other_frames_are_not_recognised(frames: bytes) -> None:
    assert learned(event("first")).count(frames) == 0


def test_a_cut_character_is_not_completed_by_the_next_event() -> None:
    before, after = event("a", ascii_only=False).split(b'"a"')
    cut, rest = before + b'"\xc3"' + after, before + b'"\xa9"' + after
    assert learned(event("first")).count(cut + rest) == 0


@pytest.mark.parametrize(
    "example",
    [
        event(""),
        event("a", usage={"prompt_tokens": 1}),
        event("a", system="[DONE]"),
        event("") + event("b"),
        b'data: {"choices": []}\n\n',
        b': {"content": "a"}\n\n',
        b"event: x\n" + event("a"),
    ],
)
def test_other_events_are_not_learned(example: bytes) -> None:
    texts = learned(example)
    assert texts.count(event("a")) == texts.count(example) == texts.count(b"") == 0


def test_the_form_may_change_a_bounded_number_of_times() -> None:
    texts = TextEvents()
    for number in range(LEARNED_MAX):
        texts.learn(event("a", number=number))
        assert texts.count(event("b", number=number)) == 1
    texts.learn(event("a"))
    assert texts.count(event("b")) == 0


_texts = st.text(st.sampled_from('ab "\\\n\té漢{}[]:,\x7f'), max_size=5)
_strings = st.binary(max_size=6) | st.text(st.sampled_from('a"\\n/u\\'), max_size=6).map(str.encode)


@given(st.lists(_texts, min_size=1, max_size=4), st.booleans())
def test_what_is_recognised_is_what_the_parser_accepts(given_texts: list[str], ascii_only: bool) -> None:
    frames = b"".join(event(text, ascii_only=ascii_only) for text in given_texts)
    count = learned(event("first")).count(frames)
    assert count in (0, len(given_texts))
    if count:
        assert are_object_events(frames) and count_events(frames) == count


@given(st.lists(_strings, min_size=1, max_size=3))
def test_bytes_that_are_no_string_are_never_recognised(strings: list[bytes]) -> None:
    before, after = event("a").split(b'"a"')
    frames = b"".join(before + b'"' + string + b'"' + after for string in strings)
    if count := learned(event("first")).count(frames):
        assert are_object_events(frames) and count_events(frames) == count == len(strings)


_events = st.sampled_from(
    [
        *[event(text, ascii_only=False) for text in (" a", "", "é", '"', "[DONE]", "data: x\n\n")],
        event(" b", compact=True),
        event("c", usage=None),
        event("d", usage={"prompt_tokens": 3, "completion_tokens": 4}),
        b": ping\n\n",
        b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n',
        event("e").replace(b"\n", b"\r\n"),
        b"event: x\n" + event("f"),
    ]
)


@given(st.lists(_events, max_size=12), st.lists(st.integers(0, 1500), max_size=8), st.booleans())
def test_both_sinks_together_get_the_bytes_that_one_sink_gets(
    sent: list[bytes], offsets: list[int], one_by_one: bool
) -> None:
    stream = b"".join(sent) + b"data: [DONE]\n\n"
    pieces = [*sent, b"data: [DONE]\n\n"] if one_by_one else cut_at(stream, offsets)

    async def passed_on(*, with_text_sink: bool) -> tuple[bytes, int]:
        response = EventStreamResponse(cast(HTTPResponse, ScriptedBody(pieces)), NOTHING_SECRET)
        taken: list[bytes] = []
        events_in_texts = 0

        def take(chunk: bytes) -> bool:
            taken.append(chunk)
            return True

        def take_text(chunk: bytes, events: int) -> bool:
            nonlocal events_in_texts
            assert are_object_events(chunk) and count_events(chunk) == events and b'"usage": {' not in chunk
            events_in_texts += events
            return take(chunk)

        assert await response.stream_to(take, TextSink(take_text) if with_text_sink else None)
        return b"".join(taken), events_in_texts

    alone, _ = asyncio.run(passed_on(with_text_sink=False))
    together, _ = asyncio.run(passed_on(with_text_sink=True))
    assert together == alone


async def test_the_second_event_of_a_form_goes_to_the_text_sink() -> None:
    pieces = [event("a"), event("b"), event("c") + event("d"), event("e")[:20], event("e")[20:], event("f")]
    response = EventStreamResponse(cast(HTTPResponse, ScriptedBody([*pieces, b"data: [DONE]\n\n"])), NOTHING_SECRET)
    texts: list[tuple[bytes, int]] = []

    def take_texts(chunk: bytes, events: int) -> bool:
        texts.append((chunk, events))
        return True

    await response.stream_to(lambda chunk: True, TextSink(take_texts))
    assert texts == [(event("b"), 1), (event("c") + event("d"), 2), (event("f"), 1)]
