"""One trace from the client's span through the gateway into the engine, as a collector receives it from both."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.processes import DEMO, Gateway, chat, until
from tests.otlp_collector import Collector, attributes

pytestmark = pytest.mark.e2e

ROOT, CHAT = "POST /v1/chat/completions", f"chat {DEMO}"
GATEWAY_PHASES = ["authenticate", "canonicalise", "cache.lookup", "admit", "queue", "route", CHAT, "settle"]
ENGINE_STAGES = ["engine.tokenize", "engine.queue", "engine.prefill", "engine.decode", "engine.detokenize"]
TREE = {ROOT: None, **dict.fromkeys(GATEWAY_PHASES, ROOT)}
TREE |= {"POST": CHAT, "engine.request": "POST", **dict.fromkeys(ENGINE_STAGES, "engine.request")}
SERVER, CLIENT = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT


def spans_of(collector: Collector, trace_id: str, root: str = ROOT) -> dict[str, Span]:
    """The trace's spans by name. Waits until gateway and engine have exported theirs."""

    def whole() -> dict[str, Span]:
        found = [span for span in collector.spans if span.trace_id.hex() == trace_id]
        names = Counter(span.name for span in found)
        assert not names or max(names.values()) == 1, names
        return {span.name: span for span in found} if {root, "engine.request"} <= names.keys() else {}

    return dict(until(whole))


def duration_ns(span: Span) -> int:
    return span.end_time_unix_nano - span.start_time_unix_nano


def add_up(parts: list[Span], whole: Span) -> bool:
    """True if the parts lie within the whole and add up to it within 5 %."""
    inside = all(
        whole.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano <= whole.end_time_unix_nano
        for part in parts
    )
    return inside and abs(sum(map(duration_ns, parts)) - duration_ns(whole)) <= 0.05 * duration_ns(whole)


@pytest.mark.parametrize("stream", [True, False])
def test_the_span_tree(local_gateway: Gateway, collector: Collector, stream: bool) -> None:
    prompt = f"{secrets.token_hex(4)} " + "A long prompt, sent twice. " * 20
    body = chat(prompt, stream=stream, max_tokens=16, ignore_eos=True)
    cold, warm = (local_gateway.post("chat/completions", body) for _ in range(2))
    for reply, is_warm in ((cold, False), (warm, True)):
        assert reply.status_code == 200
        spans = spans_of(collector, reply.headers["x-trace-id"])
        by_id = {span.span_id: span for span in spans.values()}
        parents = {
            name: by_id[span.parent_span_id].name if span.parent_span_id else None for name, span in spans.items()
        }
        assert parents == TREE
        root, chatting, attempt, request = (spans[name] for name in (ROOT, CHAT, "POST", "engine.request"))
        assert [span.kind for span in (root, chatting, attempt, request)] == [SERVER, CLIENT, CLIENT, SERVER]
        assert add_up([spans[name] for name in GATEWAY_PHASES], root)
        assert add_up([spans[name] for name in ENGINE_STAGES], request)
        assert duration_ns(attempt) <= duration_ns(chatting) <= duration_ns(root)
        assert attempt.start_time_unix_nano <= request.start_time_unix_nano <= attempt.end_time_unix_nano
        assert [event.name for event in chatting.events] == ["first_chunk"]
        _check_numbers(local_gateway, reply.headers["x-request-id"], spans, is_warm=is_warm)


def _check_numbers(gateway: Gateway, call_id: str, spans: dict[str, Span], *, is_warm: bool) -> None:
    """Engine, gateway and ledger report the same numbers for one call."""
    receipt = gateway.receipt(call_id)
    values = {name: attributes(span) for name, span in spans.items()}
    prefill, generation = values["engine.prefill"], values[CHAT]
    assert (prefill["warmpath.prefill.cached_tokens"] > 0) is is_warm
    assert prefill["warmpath.prefill.computed_tokens"] > 0
    assert prefill["warmpath.prefill.cached_tokens"] == receipt["cache_read"]
    assert prefill["warmpath.prefill.computed_tokens"] == receipt["input_uncached"]
    assert values["engine.decode"]["warmpath.decode.output_tokens"] == receipt["output"] == 16
    assert generation["gen_ai.usage.cache_read.input_tokens"] == receipt["cache_read"]
    assert generation["gen_ai.usage.output_tokens"] == 16
    assert generation["gen_ai.request.model"] == DEMO
    assert values["POST"]["warmpath.deployment"] == "local"
    assert (values["POST"]["warmpath.prefix.predicted_cached_tokens"] > 0) is is_warm
    assert values[ROOT]["warmpath.call_id"] == call_id
    assert values[ROOT]["http.response.status_code"] == 200
    assert values["settle"]["warmpath.event_id"] == receipt["event_id"]
    assert receipt["trace_id"] == spans["POST"].trace_id.hex()


@pytest.mark.slow
def test_a_client_s_trace_is_continued(local_gateway: Gateway, collector: Collector) -> None:
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{parent}-01", "tracestate": "vendor=1"}
    reply = local_gateway.post("chat/completions", chat(max_tokens=2), **headers)
    assert reply.headers["x-trace-id"] == trace_id
    spans = spans_of(collector, trace_id)
    root = spans[ROOT]
    assert root.parent_span_id.hex() == parent
    assert root.trace_state == "vendor=1"
    assert spans["engine.request"].parent_span_id == spans["POST"].span_id


@pytest.mark.slow
def test_an_unsampled_client_trace_is_not_exported(local_gateway: Gateway, collector: Collector) -> None:
    unsampled = secrets.token_hex(16)
    reply = local_gateway.post("chat/completions", chat(max_tokens=2), traceparent=f"00-{unsampled}-{'a' * 16}-00")
    assert reply.headers["x-trace-id"] == unsampled
    sampled = local_gateway.post("chat/completions", chat(max_tokens=2))
    spans_of(collector, sampled.headers["x-trace-id"])  # both processes have exported a later trace
    assert unsampled not in {span.trace_id.hex() for span in collector.spans}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "stages"),
    [
        ("completions", {"prompt": "a b c", "max_tokens": 4}, ENGINE_STAGES),
        ("embeddings", {"input": f"{secrets.token_hex(4)} a b c"}, ENGINE_STAGES[:3]),
    ],
)
def test_other_endpoints(
    local_gateway: Gateway, collector: Collector, path: str, body: dict[str, Any], stages: list[str]
) -> None:
    reply = local_gateway.post(path, {"model": DEMO, **body})
    spans = spans_of(collector, reply.headers["x-trace-id"], f"POST /v1/{path}")
    assert add_up([spans[name] for name in stages], spans["engine.request"])
    assert spans["engine.request"].parent_span_id == spans["POST"].span_id


def test_no_prompt_and_no_key_is_in_any_span(local_gateway: Gateway, collector: Collector) -> None:
    canary = secrets.token_hex(8)
    reply = local_gateway.post("chat/completions", chat(canary, max_tokens=2, user=canary, metadata={"a": canary}))
    spans_of(collector, reply.headers["x-trace-id"])
    assert not any(canary.encode() in body or b"0123456789abcdef" in body for body in collector.bodies)
    ledger = b"".join(file.read_bytes() for file in local_gateway.ledger.rglob("*.jsonl"))
    assert ledger.count(canary.encode()) == 2, "as the end user of a call that was opened and ended, and nowhere else"
    assert canary not in local_gateway.log.read_text()
