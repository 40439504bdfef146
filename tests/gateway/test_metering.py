"""What a reply consumed, whatever the server's habits; and what it cost, to the last decimal."""

from __future__ import annotations

import re
import time
from decimal import Context, Decimal, Inexact, localcontext
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metering import Meter, bill_of, cost_of, make_receipt, nanoseconds_of, new_event_id, rfc3339
from gateway.money import nanos_of, text_of
from gateway.policy import Deployment, Policy, Price
from gateway.types import Attempt, Call, Marks, Operation, Outcome, Trace, Usage
from tests.gateway.calls import a_call

POLICY = Policy.model_validate(
    {
        "deployments": [
            {
                "name": "a",
                "base_url": "http://a/v1",
                "model": "served",
                "price": {"input": "0.10", "cached_input": "0.01", "output": "0.40", "version": "2026-11"},
            },
            {"name": "unpriced", "base_url": "http://b/v1", "model": "served"},
        ],
        "models": [{"name": "m", "deployments": ["a", "unpriced"]}],
        "tenants": [{"name": "acme"}],
    }
)
PRICED, UNPRICED = POLICY.deployments
PROMPT_ESTIMATE = 40


def make_call(*, stream: bool = True, include_usage: bool = False, operation: Operation = Operation.CHAT) -> Call:
    return msgspec.structs.replace(
        a_call(policy=POLICY, tenant="acme", key="key_1"),
        stream=stream,
        include_usage=include_usage,
        operation=operation,
        prompt_tokens_estimate=PROMPT_ESTIMATE,
        trace=Trace(trace_id=0xABC, parent_span_id=0, sampled=True),
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


def test_usage_is_taken_out_for_a_client_that_did_not_ask() -> None:
    chunks = stream("a", "b")
    assert watch_all(Meter(make_call()), chunks) == b"".join(c for c in chunks if b'"usage"' not in c)
    assert watch_all(Meter(make_call(include_usage=True)), chunks) == b"".join(chunks)


def test_an_ordinary_chunk_is_the_same_object() -> None:
    meter = Meter(make_call())
    for chunk in stream("a", "b", usage=False):
        assert meter.watch(chunk) is chunk


def test_usage_between_merged_frames_is_taken_out_alone() -> None:
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


def test_text_after_the_engines_last_word_is_an_estimate() -> None:
    first = {**ROLE, "usage": {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10}}
    meter = Meter(make_call())
    watch_all(meter, [frame(first), frame(text_frame("a")), frame(text_frame("b"))])
    assert meter.usage == Usage(input_uncached=10, output=2, exact=False)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x", "content": None},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"role": "assistant", "content": "x"},
    ],
)
def test_a_stream_that_ends_early_is_estimated_by_its_frames(delta: dict[str, Any]) -> None:
    more = {**ROLE, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    meter = Meter(make_call())
    watch_all(meter, [frame(ROLE), frame(more), b": ping\n\n", frame(more), frame(more) + frame(more)])
    assert meter.usage == Usage(input_uncached=PROMPT_ESTIMATE, output=4, exact=False)
    assert not meter.complete


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
    assert meter.usage.output == 2


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_line_ends_and_spaces_are_the_servers_choice(end: str, separators: tuple[str, str]) -> None:
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
def test_odd_counts_spoil_no_answer(prompt_tokens: Any, expected: Usage | None) -> None:
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"choices": [], "usage": usage}))
    assert meter.complete and meter.usage == (expected or Usage(PROMPT_ESTIMATE))
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"error": {"message": "no"}, "usage": usage}))
    assert meter.error and not meter.complete


def test_odd_counts_of_a_chunk_leave_the_ones_before_as_an_estimate() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    counted = {"prompt_tokens": 8, "completion_tokens": 1}
    watch_all(meter, [frame({**text_frame("a"), "usage": counted})] * 2)
    assert meter.usage == Usage(8, output=1, exact=True)
    meter.watch(frame({**text_frame("b"), "usage": {"prompt_tokens": 8.5}}))
    assert meter.usage == Usage(8, output=2, exact=False)


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
        # contradictions: bounded, and never called exact
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 99}, Usage(5, output=2)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(0, 5)),
        ({"prompt_tokens": -5, "completion_tokens": 2}, Usage(output=2)),
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
def test_any_grouping_of_frames_gives_the_same(
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


PRICE = Price(input=Decimal("0.10"), cached_input=Decimal("0.01"), output=Decimal("0.40"))


def test_cost_is_exact() -> None:
    usage = Usage(input_uncached=3, cache_read=7, cache_write=2, output=11, reasoning=5)
    assert cost_of(usage, PRICE) == 4_970_000_000  # (3+2)*0.10 + 7*0.01 + 11*0.40 per million
    assert cost_of(usage, Price(input=Decimal("0.10"))) == 1_200_000_000  # cached like any other input


counts = st.integers(0, 10**12)
money = st.decimals(0, 10**6, places=9)


@given(usage=st.builds(Usage, counts, counts, counts, counts), price=st.builds(Price, input=money, output=money))
def test_cost_loses_no_decimal(usage: Usage, price: Price) -> None:
    cost = cost_of(usage, price)
    with localcontext(Context(prec=100, traps=[Inexact])):
        assert Decimal(text_of(cost)) * 10**6 == usage.input * price.input + usage.output * price.output
        assert 0 <= Decimal(nanos_of(cost)).scaleb(-9) - Decimal(text_of(cost)) < Decimal("1e-9")


def test_receipt_of_a_finished_call() -> None:
    marks = Marks()
    marks.started_ns, marks.first_chunk_ns, marks.ended_ns = 1_790_000_000_000_001_999, 1_790_000_000_250_001_999, (
        1_790_000_001_000_000_000
    )  # fmt: skip
    attempts = [
        Attempt("unpriced", "status_503", marks.started_ns, marks.first_chunk_ns, span_id=0xF, status=503),
        Attempt("a", "ok", marks.started_ns, marks.ended_ns, span_id=0x10, status=200, predicted_cached_tokens=64),
    ]
    receipt = make_receipt(
        make_call(), COUNTED, outcome=Outcome.COMPLETE, marks=marks, attempts=attempts, deployment=PRICED,
        bill=bill_of(make_call(), COUNTED, PRICED, arrived_ns=marks.started_ns),
    )  # fmt: skip
    assert (receipt.tenant, receipt.key_id, receipt.latency_class) == ("acme", "key_1", "realtime")
    assert (receipt.model_asked, receipt.model_served, receipt.deployment) == ("m", "served", "a")
    assert (receipt.started, receipt.finished) == ("2026-09-21T14:13:20.000001Z", "2026-09-21T14:13:21.000000Z")
    assert receipt.ttft_seconds == 0.25
    assert (receipt.source, receipt.exact, receipt.outcome) == ("engine", True, "complete")
    assert (receipt.cost, receipt.currency, receipt.price_version) == ("0.00000544", "USD", "2026-11")
    assert (receipt.policy_hash, receipt.trace_id) == (POLICY.hash, f"{0xABC:032x}")
    assert [(a.deployment, a.outcome, a.span_id) for a in receipt.attempts] == [
        ("unpriced", "status_503", "000000000000000f"),
        ("a", "ok", "0000000000000010"),
    ]


def test_every_field_of_a_receipt_is_in_its_place() -> None:
    price = {
        "input": "1", "cached_input": "2", "cache_write": "3", "output": "4", "reasoning": "5", "audio_input": "6",
        "audio_output": "7", "cache_write_1h": "8", "version": "v7", "currency": "EUR",
    }  # fmt: skip
    deployment = {"name": "a", "base_url": "http://a/v1", "model": "served", "price": price}
    policy = Policy.model_validate(
        {"deployments": [deployment], "models": [{"name": "m", "deployments": ["a"]}], "tenants": [{"name": "acme"}]}
    )
    call = msgspec.structs.replace(
        a_call(policy=policy, tenant="acme", key="key_1", operation=Operation.CHAT),
        id="req_1", end_user="user_1", service_tier="flex", trace=Trace(0xABC, 0, sampled=False),
    )  # fmt: skip
    marks = Marks()
    marks.started_ns, marks.first_chunk_ns, marks.ended_ns = 1_790_000_000_000_000_000, 1_790_000_000_500_000_000, (
        1_790_000_001_000_000_000
    )  # fmt: skip
    usage = Usage(20, 30, 40, 50, 11, exact=True, audio_input=12, audio_output=13, cache_write_1h=14)
    (served,) = policy.deployments
    attempts = [Attempt("a", "ok", marks.started_ns, marks.ended_ns, span_id=16, status=200, predicted_cached_tokens=9)]
    bill = bill_of(call, usage, served, arrived_ns=marks.started_ns, service_tier="flex")
    receipt = make_receipt(
        call, usage, outcome=Outcome.CLIENT_GONE, marks=marks, attempts=attempts, deployment=served, bill=bill
    )
    assert msgspec.to_builtins(receipt) == {
        "kind": "receipt",
        "event_id": receipt.event_id,
        "call_id": "req_1",
        "tenant": "acme",
        "key_id": "key_1",
        "end_user": "user_1",
        "operation": "chat/completions",
        "model_asked": "m",
        "model_served": "served",
        "deployment": "a",
        "latency_class": "realtime",
        "service_tier": "flex",
        "started": "2026-09-21T14:13:20.000000Z",
        "finished": "2026-09-21T14:13:21.000000Z",
        "ttft_seconds": 0.5,
        "outcome": "client_gone",
        "source": "engine",
        "exact": True,
        "input_uncached": 20,
        "cache_read": 30,
        "cache_write": 40,
        "output": 50,
        "reasoning": 11,
        "audio_input": 12,
        "audio_output": 13,
        "cache_write_1h": 14,
        "price_version": "v7",
        "price_input": "1",
        "price_cached_input": "2",
        "price_cache_write": "3",
        "price_output": "4",
        "price_reasoning": "5",
        "price_audio_input": "6",
        "price_audio_output": "7",
        "price_cache_write_1h": "8",
        "cost": "0.00058",  # 8*1 + 12*6 + 30*2 + 26*3 + 14*8 + 26*4 + 11*5 + 13*7 per million
        "currency": "EUR",
        "attempts": (
            {
                "deployment": "a",
                "outcome": "ok",
                "status": 200,
                "started": "2026-09-21T14:13:20.000000Z",
                "ended": "2026-09-21T14:13:21.000000Z",
                "span_id": "0000000000000010",
                "predicted_cached_tokens": 9,
            },
        ),
        "policy_hash": policy.hash,
        "trace_id": f"{0xABC:032x}",
    }
    again = make_receipt(call, usage, outcome=Outcome.COMPLETE, marks=marks, bill=bill, started="then", trace_id="it")
    assert (again.started, again.trace_id) == ("then", "it")


def costs(usage: Usage, outcome: Outcome, deployment: Deployment | None, from_cache: bool) -> tuple[str, str | None]:
    call = make_call()
    bill = bill_of(call, usage, deployment, arrived_ns=0, from_cache=from_cache)
    receipt = make_receipt(
        call, usage, outcome=outcome, marks=Marks(), bill=bill, deployment=deployment, from_cache=from_cache
    )
    return receipt.source, receipt.cost


def test_who_pays_what() -> None:
    guess = Usage(input_uncached=10, output=5)
    assert costs(guess, Outcome.CLIENT_GONE, PRICED, False) == ("estimate", "0.000003")
    assert costs(COUNTED, Outcome.COMPLETE, UNPRICED, False) == ("engine", None)
    assert costs(COUNTED, Outcome.COMPLETE, None, True) == ("cache", "0")
    assert costs(Usage(), Outcome.REFUSED, None, False) == ("estimate", "0")
    assert costs(Usage(), Outcome.CLIENT_GONE, None, False) == ("estimate", "0")
    assert costs(Usage(), Outcome.CLIENT_GONE, UNPRICED, False) == ("estimate", None)


def test_event_ids_are_ulids_in_order() -> None:
    ids = [new_event_id() for _ in range(1000)]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch("[0-7][0-9A-HJKMNP-TV-Z]{25}", event_id) for event_id in ids)


def test_event_ids_hold_when_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_event_id()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert new_event_id() > before


@given(st.lists(st.integers(0, 4_102_444_800_000_000_000), min_size=2, max_size=5))
def test_times_sort_as_text(times_ns: list[int]) -> None:
    texts = [rfc3339(time_ns // 1000 * 1000) for time_ns in sorted(times_ns)]
    assert texts == sorted(texts) and len({len(text) for text in texts}) == 1


def counted(number: int, *, end: str = "\n\n") -> bytes:
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 10, "completion_tokens": number, "total_tokens": 10 + number}
    return frame(text_frame("x", usage={**usage, "prompt_tokens_details": details}), end=end)


def test_counts_of_every_chunk_that_only_we_wanted_are_taken_out() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    bare = frame(text_frame("x"))
    assert [meter.watch(counted(number)) for number in range(1, 4)] == [bare] * 3
    assert meter.usage == Usage(input_uncached=6, cache_read=4, output=3, exact=True)  # it may be cut here
    assert watch_all(meter, [frame(USAGE_ONLY), frame("[DONE]")]) == frame("[DONE]")
    assert meter.usage == COUNTED and meter.complete


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_counts_are_taken_out_of_merged_frames_too(end: str, include_usage: bool) -> None:
    meter = Meter(make_call(include_usage=include_usage))
    meter.strip_every_usage = True
    chunks = [counted(1, end=end), counted(2, end=end) + counted(3, end=end), frame(USAGE_ONLY) + frame("[DONE]")]
    passed = watch_all(meter, chunks)
    assert passed.count(b'"usage"') == include_usage
    assert passed.count(b'"content":"x"') == 3 and passed.endswith(b"data: [DONE]\n\n")
    assert meter.usage == COUNTED


def test_text_behind_the_last_counts_is_an_estimate() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    watch_all(meter, [counted(1), counted(2), frame(text_frame("x"))])
    assert meter.usage == Usage(input_uncached=6, cache_read=4, output=3)


def test_a_text_that_imitates_counts_is_left_alone() -> None:
    meter = Meter(make_call())
    meter.strip_every_usage = True
    meter.watch(frame(text_frame("a")))
    chunk = frame(text_frame(',"usage":{"prompt_tokens":1}}\n\n'))
    assert meter.watch(chunk) is chunk


def test_anthropics_counts_come_in_two_parts() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 21, "cache_read_input_tokens": 7}}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 15}}
    meter = Meter(make_call(include_usage=True))
    watch_all(meter, [frame(start), frame(end)])
    assert meter.usage == Usage(21, 7, output=15, exact=True)


def test_a_response_counts_inside_of_its_last_event() -> None:
    usage = {"input_tokens": 36, "output_tokens": 8, "total_tokens": 44, "input_tokens_details": {"cached_tokens": 6}}
    end = {"type": "response.completed", "response": {"id": "r", "service_tier": "flex", "usage": usage}}
    meter = Meter(make_call(include_usage=True))
    watch_all(meter, [frame(end)])
    assert meter.usage == Usage(30, 6, output=8, exact=True)
    assert meter.service_tier == "flex"


def test_ollama_counts_in_the_answer_itself() -> None:
    meter = Meter(make_call(stream=False))
    meter.watch(orjson.dumps({"model": "m", "response": "hi", "done": True, "prompt_eval_count": 26, "eval_count": 9}))
    assert meter.usage == Usage(26, output=9, exact=True)


def priced(*prices: dict[str, Any], model: dict[str, Any] | None = None, fallback: bool = False) -> Policy:
    """A model on one deployment with these prices; `fallback`: that is reached as a fallback only."""
    deployment = {"name": "a", "base_url": "http://a/v1", "model": "served", "price": list(prices)}
    models: list[dict[str, Any]] = [{"name": "m", "deployments": ["a"], **(model or {})}]
    deployments: list[dict[str, Any]] = [deployment]
    if fallback:
        deployments.append({"name": "down", "base_url": "http://b/v1", "model": "served"})
        models.append({"name": "asked", "deployments": ["down"], "fallbacks": ["m"]})
    document = {"deployments": deployments, "models": models, "tenants": [{"name": "acme"}]}
    return Policy.model_validate(document)


def billed(policy: Policy, *, model: str = "m", tier: str | None = None, at: str = "2026-11-20", **changes: Any) -> Any:
    call = msgspec.structs.replace(make_call(), policy=policy, model=policy.models_by_name[model], **changes)
    arrived_ns = nanoseconds_of(f"{at}Z" if "T" in at else f"{at}T00:00:00Z")
    bill = bill_of(call, Usage(1_000_000), policy.deployments[0], arrived_ns=arrived_ns, service_tier=tier)
    return None if bill.cost is None else text_of(bill.cost)


def test_the_first_price_that_fits_holds() -> None:
    policy = priced(
        {"input": 1, "class": "batch", "service_tier": "flex"},
        {"input": 2, "class": "batch"},
        {"input": 3, "service_tier": ["flex", "batch"]},
        {"input": 4, "until": "2026-11-20"},
        {"input": 5, "from": "2026-11-20", "until": "2026-12-01T06:00:00Z"},
    )
    assert billed(policy, class_name="batch", tier="flex") == "1"
    assert billed(policy, class_name="batch", tier="default") == "2"
    assert billed(policy, tier="batch") == "3"
    assert billed(policy, at="2026-11-19T23:59:59") == "4"
    assert billed(policy, tier="anything", at="2026-11-20") == "5"
    assert billed(policy, at="2026-12-01T05:59:59") == "5"
    to_the_microsecond = priced({"input": 6, "until": "2026-11-20T00:00:00.5Z"}, {"input": 7})
    assert billed(to_the_microsecond, at="2026-11-20T00:00:00.499999") == "6"
    assert billed(to_the_microsecond, at="2026-11-20T00:00:00.5") == "7"
    assert billed(policy, at="2026-12-01T06:00:00") is None  # unpriced, and not free


def test_a_models_price_holds_where_its_deployment_has_none() -> None:
    own = {"price": {"input": 7}}
    assert billed(priced(model=own)) == "7"
    assert billed(priced({"input": 2}, model=own)) == "2"
    assert billed(priced(model=own, fallback=True), model="asked") == "7"
    assert billed(priced()) is None


def test_an_answer_from_the_cache_costs_what_the_model_says() -> None:
    call = msgspec.structs.replace(make_call(), policy=priced(model={"cache_price": {"input": 1, "output": 2}}))
    bill = bill_of(call, Usage(1_000_000, output=1_000_000), None, arrived_ns=0, from_cache=True)
    assert bill.cost is not None and text_of(bill.cost) == "3"


def test_every_bucket_has_its_price_or_inherits_one() -> None:
    usage = Usage(10, 20, 30, 40, 5, audio_input=3, audio_output=7, cache_write_1h=12)
    prices = {
        "input": 1, "cached_input": 2, "cache_write": 3, "output": 5, "reasoning": 7, "audio_input": 11,
        "audio_output": 13, "cache_write_1h": 17,
    }  # fmt: skip
    own = Price.model_validate(prices)
    expected = 7 * 1 + 3 * 11 + 20 * 2 + 18 * 3 + 12 * 17 + (40 - 5 - 7) * 5 + 5 * 7 + 7 * 13
    assert text_of(cost_of(usage, own) * 10**6) == str(expected)
    inherited = Price.model_validate({"input": 1, "output": 5})
    assert text_of(cost_of(usage, inherited) * 10**6) == str(60 * 1 + 40 * 5)
    of_any_write = Price.model_validate({"input": 1, "cache_write": 3})
    assert text_of(cost_of(usage, of_any_write) * 10**6) == str(30 * 1 + 30 * 3)
    assert own.dearest == (17 * 10**9, 13 * 10**9)


def test_the_receipt_says_which_price_held() -> None:
    policy = priced({"input": "0.1", "reasoning": "0.3", "service_tier": "flex", "version": "flex-1"})
    call = msgspec.structs.replace(make_call(), policy=policy, service_tier="auto")
    meter = Meter(call)
    watch_all(meter, [frame({**ROLE, "service_tier": "flex"}), frame(USAGE_ONLY)])
    bill = bill_of(call, meter.usage, policy.deployments[0], arrived_ns=0, service_tier=meter.service_tier)
    receipt = make_receipt(call, meter.usage, outcome=Outcome.COMPLETE, marks=Marks(), bill=bill)
    assert (receipt.service_tier, receipt.price_version) == ("flex", "flex-1")
    assert (receipt.price_input, receipt.price_reasoning, receipt.price_output) == ("0.1", "0.3", "0")
    row = orjson.loads(msgspec.json.encode(receipt))
    assert "price_cache_write" not in row and "audio_input" not in row


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ({"input": 1, "from": "2026-12-01", "until": "2026-11-01"}, "never holds"),
        ({"input": 1, "from": "soon"}, "as in 2026-12-01"),
        ({"input": 1, "class": "bach"}, "did you mean 'batch'"),
        ({"input": "0.0000000001"}, "9 decimal places"),
    ],
)
def test_a_price_that_can_not_be_meant_is_refused(price: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        priced(price)
