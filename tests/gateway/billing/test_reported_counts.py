"""Where vendors and engines of other APIs report their counts."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from gateway.billing.metering import Meter
from gateway.types import Operation, Usage
from tests.gateway.billing.frames import (
    ROLE,
    USAGE,
    frame,
    make_call,
    text_frame,
    watch_all,
)
from tests.gateway.calls import a_call


def test_anthropics_counts_come_in_two_parts() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 21, "cache_read_input_tokens": 7}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 15}}
    meter = Meter(make_call(include_usage=True))
    watch_all(meter, [frame(start)])
    assert meter.usage == Usage(21, 7, exact=False), "the vendor counts on after a disconnect"
    watch_all(meter, [frame(end)])
    assert meter.usage == Usage(21, 7, output=15, exact=True)


COUNTED_AS_MOONSHOT = {"prompt_tokens": 19, "completion_tokens": 21, "total_tokens": 40, "cached_tokens": 16}


@pytest.mark.parametrize("name", ["warmpath", "x_groq"])
def test_counts_are_read_from_vendor_fields(name: str) -> None:
    meter = Meter(make_call())
    first = frame({**ROLE, name: {"id": "req_1", "usage": USAGE}})
    assert meter.watch(first) == first
    at_the_end = name == "x_groq"  # the other one is at the beginning of a stream
    assert meter.usage == Usage(input_uncached=36, cache_read=64, output=3, reasoning=2, exact=at_the_end)
    meter.watch(frame(text_frame("more")) + frame("[DONE]"))
    assert (meter.usage.output, meter.usage.exact) == (4, False)


def test_counts_are_read_from_a_responses_last_event() -> None:
    usage = {"input_tokens": 36, "output_tokens": 8, "total_tokens": 44, "input_tokens_details": {"cached_tokens": 6}}
    end = {"type": "response.completed", "response": {"id": "r", "service_tier": "flex", "usage": usage}}
    meter = Meter(make_call(include_usage=True))
    watch_all(meter, [frame(end)])
    assert meter.usage == Usage(30, 6, output=8, exact=True)
    assert meter.service_tier == "flex"


def test_counts_are_read_from_ollamas_answer() -> None:
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"model": "m", "response": "hi", "done": True, "prompt_eval_count": 26, "eval_count": 9}))
    assert meter.usage == Usage(26, output=9, exact=True)


def test_the_service_tier_is_the_one_that_the_reply_names() -> None:
    meter = Meter(msgspec.structs.replace(make_call(), service_tier="auto"))
    meter.watch(frame(ROLE))
    assert meter.service_tier == "auto"
    meter.watch(frame(text_frame("a", service_tier="flex")))
    assert meter.service_tier == "flex"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Moonshot's last chunk
        (
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": COUNTED_AS_MOONSHOT}]},
            Usage(3, 16, output=21, exact=True),
        ),
        # an older llama.cpp
        (
            {"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 4}, "timings": {"cache_n": 20}},
            Usage(10, 20, output=4, exact=True),
        ),
        ({"choices": [{"index": 0, "delta": {}, "usage": {"prompt_tokens": "many"}}]}, None),
    ],
)
def test_counts_in_places_of_their_own(fields: dict[str, Any], expected: Usage | None) -> None:
    meter = Meter(make_call(include_usage=True))
    watch_all(meter, [frame(fields)])
    meter.watch(frame("[DONE]"))
    assert meter.usage == expected if expected is not None else not meter.usage.exact


def test_an_embedding_that_only_has_a_total_is_counted_exactly() -> None:
    meter = Meter(a_call({"model": "m", "input": "some words"}, operation=Operation.EMBEDDING))
    meter.watch(b'{"object": "list", "data": [], "usage": {"total_tokens": 4}}')  # Voyage
    assert meter.usage == Usage(4, exact=True)
