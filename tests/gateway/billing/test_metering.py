"""The usage of a reply, in every form in which engines send it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.metering import Meter
from gateway.types import Call, Operation, Usage
from tests.gateway.calls import a_call

CALL = a_call()
PROMPT_ESTIMATE = 40


def make_call(*, stream: bool = True, include_usage: bool = False, operation: Operation = Operation.CHAT) -> Call:
    return msgspec.structs.replace(
        CALL,
        stream=stream,
        include_usage=include_usage,
        operation=operation,
        prompt_tokens_estimate=PROMPT_ESTIMATE,
    )


def frame(value: dict[str, Any] | str, *, separators: tuple[str, str] = (",", ":"), end: str = "\n\n") -> bytes:
    text = value if isinstance(value, str) else dumps(value, separators)
    return f"data: {text}{end}".encode()


def dumps(value: dict[str, Any], separators: tuple[str, str]) -> str:
    compact = orjson.dumps(value).decode()
    if separators == (",", ":"):
        return compact
    # The spaces of json.dumps, put after the colons and commas that stand outside of strings.
    return re.sub(r'("(?:[^"\\]|\\.)*")|([:,])', lambda m: m[1] or m[2] + " ", compact)


def text_frame(content: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": None}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}


ROLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
}
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "total_tokens": 103,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
USAGE_ONLY = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
COUNTED = Usage(input_uncached=36, cache_read=64, output=3, reasoning=2, exact=True)


def watch_all(meter: Meter, chunks: list[bytes]) -> bytes:
    return b"".join(meter.watch(chunk) for chunk in chunks)


def stream(*texts: str, usage: bool = True) -> list[bytes]:
    frames = [frame(ROLE), *(frame(text_frame(text)) for text in texts)]
    return [*frames, *([frame(USAGE_ONLY)] if usage else []), frame("[DONE]")]


def test_the_engines_counts_become_buckets_that_do_not_overlap() -> None:
    meter = Meter(make_call())
    watch_all(meter, stream("a", "b", "c"))
    assert meter.usage == COUNTED
    assert (meter.usage.input, meter.usage.total) == (100, 103)
    assert meter.complete and not meter.error


def test_usage_is_removed_unless_the_client_requested_it() -> None:
    chunks = stream("a", "b")
    assert watch_all(Meter(make_call()), chunks) == b"".join(c for c in chunks if b'"usage"' not in c)
    assert watch_all(Meter(make_call(include_usage=True)), chunks) == b"".join(chunks)


def test_an_ordinary_chunk_is_the_same_object() -> None:
    meter = Meter(make_call())
    for chunk in stream("a", "b", usage=False):
        assert meter.watch(chunk) is chunk


def test_only_the_usage_frame_is_removed_from_merged_frames() -> None:
    text, done = frame(text_frame("a")), frame("[DONE]")
    meter = Meter(make_call())
    assert meter.watch(frame(ROLE) + text + frame(USAGE_ONLY) + done) == frame(ROLE) + text + done
    assert meter.usage == COUNTED and meter.complete


def test_usage_on_every_chunk_stays_and_the_last_one_wins() -> None:
    def counted(n: int) -> bytes:
        usage = {"prompt_tokens": 10, "completion_tokens": n, "total_tokens": 10 + n}
        return frame(text_frame("x", usage=usage))

    meter, chunks = Meter(make_call()), [counted(1), counted(2), counted(3)]
    assert watch_all(meter, chunks) == b"".join(chunks)
    # The stream broke here: every token that came was counted by the engine.
    assert meter.usage == Usage(input_uncached=10, output=3, exact=True)
    assert not meter.complete


def test_text_after_the_engines_counts_is_an_estimate() -> None:
    first = {**ROLE, "usage": {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10}}
    meter = Meter(make_call())
    watch_all(meter, [frame(first), frame(text_frame("a")), frame(text_frame("b"))])
    assert meter.usage == Usage(input_uncached=10, output=1, exact=False)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "12345678"},
        {"reasoning_content": "12345678", "reasoning": "12345678"},
        {"reasoning": "12345678", "content": None},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "func", "arguments": "{1:2"}}]},
        {"role": "assistant", "content": "12345678"},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "12345678"}]}]},
        {"content": "\u00e9" * 4},
    ],
)
def test_a_stream_that_ends_early_is_estimated_by_its_bytes_however_they_are_framed(delta: dict[str, Any]) -> None:
    more = {**ROLE, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    meter = Meter(make_call())
    watch_all(meter, [frame(ROLE), frame(more), b": ping\n\n", frame(more), frame(more) + frame(more)])
    assert meter.usage == Usage(input_uncached=PROMPT_ESTIMATE, output=8, exact=False)
    assert not meter.complete
    one = Meter(make_call())
    text = "12345678" * 4
    one.watch(frame(text_frame(text)))
    assert one.usage.output == 8
    assert one.text_sample == text and one.is_text_whole


def test_the_text_after_the_sample_counts_in_proportion() -> None:
    meter, words = Meter(make_call()), 1_464  # in frames of many words
    texts = ["word " * 24] * (words // 24)
    watch_all(meter, stream(*texts, usage=False)[:-1])
    assert meter.usage.output == pytest.approx(words * 5 / 4, rel=0.02)
    long = Meter(make_call())
    watch_all(long, stream(*["word " * 4] * 5_000, usage=False)[:-1])
    assert not long.is_text_whole
    assert long.usage.output == pytest.approx(5_000 * 20 / 4, rel=0.02)
    long.set_sample_tokens(len(long.text_sample.split()))
    assert long.usage.output == pytest.approx(20_000, rel=0.02), "at the tokenizer's rate"


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=20))
def test_the_estimate_depends_on_the_text_and_not_on_its_frames(texts: list[str]) -> None:
    whole, parts = Meter(make_call()), Meter(make_call())
    watch_all(whole, stream("".join(texts), usage=False)[:-1])
    watch_all(parts, stream(*texts, usage=False)[:-1])
    expected = -(-len("".join(texts).encode()) // 4)
    assert whole.usage.output == parts.usage.output == expected


def test_without_any_output_nothing_is_billed() -> None:
    meter = Meter(make_call())
    assert meter.usage == Usage()
    meter.watch(frame(ROLE))
    assert meter.usage == Usage()


@pytest.mark.parametrize(
    "content", ["data: [DONE]", "\n\ndata: [DONE]\n\n", '"usage":{"prompt_tokens":1}', '"error"', "usage", "error"]
)
def test_content_that_imitates_the_protocol_is_content(content: str) -> None:
    meter, chunk = Meter(make_call()), frame(text_frame(content))
    meter.watch(frame(text_frame("first")))
    assert meter.watch(chunk) is chunk
    assert not meter.complete and not meter.error
    assert meter.usage.output == -(-len("first" + content) // 4)


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_any_line_ends_and_spaces_are_read(end: str, separators: tuple[str, str]) -> None:
    values: list[Any] = [ROLE, text_frame("a: b, c"), text_frame("d", usage=None), USAGE_ONLY, "[DONE]"]
    frames = [frame(value, separators=separators, end=end) for value in values]
    frames[-1] = frames[-1].replace(b"data: ", b"data:")
    meter = Meter(make_call())
    assert watch_all(meter, [frames[0], frames[1] + frames[2], frames[3] + frames[4]]) == b"".join(
        [*frames[:3], frames[4]]
    )
    assert meter.usage == COUNTED and meter.complete


@pytest.mark.parametrize(
    "failure",
    ['{"error":{"message":"out of memory","code":500}}', '{"error": "boom"}', '{"object":"error","message":"boom"}'],
)
def test_an_error_in_the_stream_is_seen_and_passed_on(failure: str) -> None:
    meter = Meter(make_call())
    meter.watch(frame(text_frame("a")))
    chunk = frame(failure) + frame("[DONE]")
    assert meter.watch(chunk) is chunk
    assert meter.error and not meter.complete


def test_a_whole_json_answer() -> None:
    body = orjson.dumps({"object": "chat.completion", "choices": [{"message": {"content": "hi"}}], "usage": USAGE})
    meter = Meter(make_call(stream=False))
    assert meter.watch(body) is body
    assert meter.usage == COUNTED and meter.complete


def test_embeddings_have_input_only() -> None:
    body = {"object": "list", "data": [{"embedding": [0.1, 0.2]}], "usage": {"prompt_tokens": 8, "total_tokens": 8}}
    meter = Meter(make_call(stream=False, operation=Operation.EMBEDDING))
    meter.watch(orjson.dumps(body))
    assert meter.usage == Usage(input_uncached=8, exact=True)


def test_a_streamed_completion() -> None:
    chunk = frame({"object": "text_completion", "choices": [{"index": 0, "text": "hi", "finish_reason": None}]})
    meter = Meter(make_call(operation=Operation.COMPLETION))
    watch_all(meter, [chunk, chunk, frame(USAGE_ONLY)])
    assert meter.usage == COUNTED


def test_a_json_answer_without_usage_is_estimated_from_its_text() -> None:
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"choices": [{"message": {"role": "assistant", "content": "12345678"}}]}))
    assert meter.usage == Usage(input_uncached=PROMPT_ESTIMATE, output=2, exact=False)


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"),
    [(8.0, Usage(8, exact=True)), ("8", Usage(8, exact=True)), ("many", Usage(PROMPT_ESTIMATE)), (8.5, None)],
)
def test_malformed_counts_do_not_fail_an_answer(prompt_tokens: Any, expected: Usage | None) -> None:
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"choices": [], "usage": usage}))
    assert meter.complete and meter.usage == (expected or Usage(PROMPT_ESTIMATE))
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"error": {"message": "no"}, "usage": usage}))
    assert meter.error and not meter.complete


@pytest.mark.parametrize("error", [None, "", {}])
def test_an_empty_error_is_no_error(error: Any) -> None:
    whole = Meter(make_call(stream=False))
    whole.watch(orjson.dumps({"choices": [], "error": error}))
    assert whole.complete and not whole.error
    stream = Meter(make_call())
    stream.watch(b"data: " + orjson.dumps({"choices": [{"delta": {"content": "x"}}], "error": error}) + b"\n\n")
    stream.watch(b"data: [DONE]\n\n")
    assert stream.complete and not stream.error


def test_malformed_counts_of_a_chunk_make_the_usage_an_estimate() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    counted = {"prompt_tokens": 8, "completion_tokens": 1}
    watch_all(meter, [frame({**text_frame("a"), "usage": counted})] * 2)
    assert meter.usage == Usage(8, output=1, exact=True)
    meter.watch(frame({**text_frame("b"), "usage": {"prompt_tokens": 8.5}}))
    assert meter.usage == Usage(PROMPT_ESTIMATE, output=1, exact=False)
    assert meter.implausible == 'malformed counts: {"prompt_tokens":8.5}'
    watch_all(meter, [frame({**text_frame("c"), "usage": {**counted, "completion_tokens": 4}})])
    assert meter.usage == Usage(8, output=4, exact=True) and meter.implausible is None, "newer counts are used again"


def test_a_body_that_is_not_json_is_no_answer() -> None:
    meter = Meter(make_call(stream=False))
    meter.watch(b"<html>")
    assert not meter.complete and meter.usage == Usage()


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2}, Usage(5, output=2, exact=True)),
        ({"prompt_tokens_details": None, "prompt_tokens": 5, "total_tokens": 5}, Usage(5, exact=True)),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3}},
            Usage(2, 4, 3, exact=True),
        ),
        # thinking counted beside the answer
        (
            {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 10,
             "completion_tokens_details": {"reasoning_tokens": 3}},
            Usage(5, output=5, reasoning=3, exact=True),
        ),
        # a total that contradicts: never called exact
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 3}, Usage(5, output=2)),
        (
            {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 99,
             "completion_tokens_details": {"reasoning_tokens": 0}},
            Usage(5, output=94, remainder=92),
        ),
        # tokens that only the total includes are a named part of the output
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 99}, Usage(5, output=94, remainder=92)),
    ],
)  # fmt: skip
def test_counts_are_checked(counts: dict[str, Any], expected: Usage) -> None:
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"usage": counts}))
    assert meter.usage == expected


@given(
    texts=st.lists(st.text(max_size=20), max_size=8),
    end=st.sampled_from(["\n\n", "\r\n\r\n"]),
    include_usage=st.booleans(),
    data=st.data(),
)
def test_the_grouping_of_frames_does_not_matter(
    texts: list[str], end: str, include_usage: bool, data: st.DataObject
) -> None:
    values: list[Any] = [ROLE, *map(text_frame, texts), USAGE_ONLY, "[DONE]"]
    frames = [frame(value, end=end) for value in values][: data.draw(st.integers(0, len(values)), label="cut after")]
    chunks: list[bytes] = []
    for one in frames:
        merge = data.draw(st.booleans(), label="merge")
        if chunks and merge:
            chunks[-1] += one
        else:
            chunks.append(one)
    merged, single = Meter(make_call(include_usage=include_usage)), Meter(make_call(include_usage=include_usage))
    assert watch_all(merged, chunks) == watch_all(single, frames)
    assert (merged.usage, merged.complete, merged.error) == (single.usage, single.complete, single.error)


def counted(number: int, *, end: str = "\n\n") -> bytes:
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 10, "completion_tokens": number, "total_tokens": 10 + number}
    return frame(text_frame("x", usage={**usage, "prompt_tokens_details": details}), end=end)


def test_counts_of_every_chunk_are_removed_if_the_client_did_not_request_them() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    bare = frame(text_frame("x"))
    assert [meter.watch(counted(number)) for number in range(1, 4)] == [bare] * 3
    assert meter.usage == Usage(input_uncached=6, cache_read=4, output=3, exact=True)  # exact if cut here
    assert watch_all(meter, [frame(USAGE_ONLY), frame("[DONE]")]) == frame("[DONE]")
    assert meter.usage == COUNTED and meter.complete


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_counts_are_removed_from_merged_frames(end: str, include_usage: bool) -> None:
    meter = Meter(make_call(include_usage=include_usage))
    meter.strip_every_usage = True
    chunks = [counted(1, end=end), counted(2, end=end) + counted(3, end=end), frame(USAGE_ONLY) + frame("[DONE]")]
    passed = watch_all(meter, chunks)
    assert passed.count(b'"usage"') == include_usage
    assert passed.count(b'"content":"x"') == 3 and passed.endswith(b"data: [DONE]\n\n")
    assert meter.usage == COUNTED


def test_text_after_the_last_counts_is_an_estimate() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    watch_all(meter, [counted(1), counted(2), frame(text_frame("x"))])
    assert meter.usage == Usage(input_uncached=6, cache_read=4, output=3)


def test_text_that_looks_like_counts_is_not_removed() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    meter.watch(frame(text_frame("a")))
    chunk = frame(text_frame(',"usage":{"prompt_tokens":1}}\n\n'))
    assert meter.watch(chunk) is chunk


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
