"""The usage of a reply, in every form in which engines send it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.metering import Meter
from gateway.types import Operation, Usage
from tests.gateway.billing.frames import (
    COUNTED,
    PROMPT_ESTIMATE,
    ROLE,
    USAGE,
    USAGE_ONLY,
    frame,
    make_call,
    stream,
    text_frame,
    watch_all,
)


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
