"""The last calls: the fields of a call, what is stored of it, and the bounds."""

from __future__ import annotations

import gc
import json
from typing import Any

import msgspec
import pytest

from gateway.telemetry import CallRecord, RecentCalls, Telemetry
from gateway.telemetry.recent_calls import QUEUES_MAX, RECENT_CALLS, RecentCallsQuery, decode_recent_calls
from gateway.types import Call
from tests.gateway.telemetry.conftest import CANARY, START_NS, TRACE, timings


def calls_of(recent: RecentCalls, limit: int = RECENT_CALLS, **query: Any) -> list[dict[str, Any]]:
    return [
        json.loads(bytes(call.json)) for call in decode_recent_calls(recent.newest(RecentCallsQuery(limit, **query)))
    ]


def names(recent: RecentCalls, **query: Any) -> list[str]:
    return [call["call_id"] for call in calls_of(recent, **query)]


def answered(name: str, record: CallRecord, class_name: str, ended: int) -> CallRecord:
    """A call that was answered by its first attempt."""
    assert record.call is not None
    call = msgspec.structs.replace(record.call, class_name=class_name)
    return msgspec.structs.replace(
        record, call_id=name, call=call, attempts=record.attempts[-1:], timings=timings(("chat", 1), ended=ended)
    )


def a_refusal(name: str) -> CallRecord:
    return CallRecord(
        call_id=name, trace=TRACE, server_span_id=1, timings=timings(("authenticate", 1), ended=3), method="POST",
        path="/v1/embeddings", status=401, error_code="invalid_api_key",
    )  # fmt: skip


def test_a_call_has_all_fields_of_its_record(record: CallRecord) -> None:
    recent = RecentCalls(worker=3)
    Telemetry(recent=recent).record(record)
    (call,) = calls_of(recent)
    phases = call.pop("phases")
    assert phases[0] == {"name": "authenticate", "start_ms": 0.0, "end_ms": 0.02, "within_chat": False}
    assert [phase["name"] for phase in phases[-2:]] == ["chat", "settle"]
    assert phases[-1]["end_ms"] == call["duration_ms"]
    assert call == {
        "call_id": "call-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "time": "2026-11-18T11:06:40.000Z",
        "path": "/v1/chat/completions",
        "operation": "chat/completions",
        "status": 200,
        "outcome": "complete",
        "result": "answered",
        "error_code": None,
        "tenant": "dev",
        "key_id": "dev",
        "model": "qwen3",
        "class": "realtime",
        "cache": "miss",
        "deployment": "b",
        "route_reason": "prefix",
        "event_id": "01K0EVENT",
        "finish_reasons": ["stop"],
        "duration_ms": 50.4,
        "own_ms": 0.6,
        "queued_ms": 1.0,
        "ttft_ms": 9.01,
        "usage": {
            "input_uncached": 40, "cache_read": 80, "cache_write": 0, "output": 30, "reasoning": 10, "exact": True,
        },
        "cost": None,
        "currency": None,
        "predicted_cached_tokens": 64,
        "attempts": [
            {"deployment": "a", "outcome": "connect_error", "failed": True, "status": None,
             "start_ms": 1.2, "end_ms": 1.9, "span_id": "00000000000000a1", "predicted_cached_tokens": 96,
             "continues": False},
            {"deployment": "b", "outcome": "ok", "failed": False, "status": 200, "start_ms": 2.0, "end_ms": 50.0,
             "span_id": "00000000000000b1", "predicted_cached_tokens": 64, "continues": False},
        ],
        "worker": 3,
    }  # fmt: skip


def test_a_call_has_its_cost(record: CallRecord) -> None:
    recent = RecentCalls()
    recent.add(msgspec.structs.replace(record, cost=5_440_000_000, currency="USD"))
    (call,) = calls_of(recent)
    assert (call["cost"], call["currency"]) == ("0.00000544", "USD")


def test_a_request_rejected_by_authentication_has_few_fields() -> None:
    recent = RecentCalls()
    recent.add(a_refusal("r"))
    (call,) = calls_of(recent)
    nothing = ("operation", "outcome", "tenant", "key_id", "model", "class", "deployment", "route_reason", "event_id")
    assert all(call[name] is None for name in (*nothing, "queued_ms", "ttft_ms", "usage"))
    assert (call["call_id"], call["status"], call["error_code"], call["attempts"]) == ("r", 401, "invalid_api_key", [])


def test_no_prompt_is_reported_and_no_call_is_kept_alive(record: CallRecord) -> None:
    recent = RecentCalls()
    recent.add(record)
    assert CANARY.encode() not in recent.newest(RecentCallsQuery(1))

    def reachable(thing: object, seen: set[int]) -> bool:
        """True if the garbage collector reaches a call or the fields of one from here."""
        if isinstance(thing, Call | CallRecord | msgspec.Raw):
            return True
        seen.add(id(thing))
        return any(
            reachable(other, seen)
            for other in gc.get_referents(thing)
            if id(other) not in seen and not isinstance(other, type) and not callable(other)
        )

    assert not reachable(recent._queues, set())


def test_the_last_calls_are_kept_newest_first() -> None:
    recent = RecentCalls(capacity=3)
    for number in range(5):
        recent.add(a_refusal(f"c{number}"))
    assert [call["call_id"] for call in calls_of(recent)] == ["c4", "c3", "c2"]
    assert [call["call_id"] for call in calls_of(recent, 1)] == ["c4"]
    assert calls_of(recent) == calls_of(recent), "the encoded calls are reused"
    assert decode_recent_calls(recent.newest(RecentCallsQuery(1)))[0].started_ns == START_NS


def test_neither_a_batch_nor_a_busy_hour_displaces_failed_calls(record: CallRecord) -> None:
    recent = RecentCalls(capacity=3)
    recent.add(answered("r0", record, "realtime", ended=10))
    # Answered by the second attempt.
    recent.add(msgspec.structs.replace(record, call_id="retried", timings=timings(("chat", 1), ended=11)))
    for number in range(5):
        recent.add(answered(f"b{number}", record, "batch", ended=20 + number))
        recent.add(answered(f"r{number + 1}", record, "realtime", ended=30 + number))
    assert names(recent) == ["r5", "r4", "r3", "b4", "b3", "b2", "retried"]
    assert names(recent, limit=2) == ["r5", "r4"]
    assert names(recent, class_name="batch", limit=2) == ["b4", "b3"]
    assert names(recent, troubled=True) == ["retried"] == names(recent, class_name="realtime", troubled=True)
    assert names(recent, class_name="batch", troubled=True) == []


def test_the_number_of_classes_is_bounded(record: CallRecord) -> None:
    recent = RecentCalls(capacity=2)
    for number in range(5 * QUEUES_MAX):
        recent.add(answered(f"c{number}", record, f"class {number}", ended=number + 2))
    assert len(calls_of(recent)) == QUEUES_MAX + 2
    assert (
        names(recent, limit=1) == [f"c{5 * QUEUES_MAX - 1}"] == names(recent, class_name=f"class {5 * QUEUES_MAX - 1}")
    )


@pytest.mark.parametrize("query", [b"", b"3", b"[-1]", b'["3"]', b"[3,4]", b"[3"])
def test_an_invalid_query_has_an_empty_answer(query: bytes) -> None:
    recent = RecentCalls()
    recent.add(a_refusal("r"))
    assert recent.answer(query) == b""
    assert recent.answer(b"[1,null,true]") == recent.newest(RecentCallsQuery(1))


@pytest.mark.parametrize("content", [b"", b"# HELP x y", b"[[1]]", b'{"object": "list"}'])
def test_what_is_no_such_list_is_refused(content: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_recent_calls(content)
