"""Spans of a request: contiguous phases under the caller's trace, and their export to a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from backend.server.tracing import EnginePhaseTimings, RequestTrace, Tracer, otlp_tracer, phases

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TIMINGS = EnginePhaseTimings(1_000, 0, 1_100, 1_200, 1_500, 1_900, 2_000)
NAMES = ["engine.tokenize", "engine.queue", "engine.prefill", "engine.decode", "engine.detokenize"]


class RecordingProcessor(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def record(
    traceparent: str | None = None, timings: EnginePhaseTimings = TIMINGS, error: str | None = None
) -> list[ReadableSpan]:
    kept = RecordingProcessor()
    headers = {"traceparent": traceparent} if traceparent else {}
    Tracer(kept).record(RequestTrace(timings, headers, {"a": 1}, {"l": 4}, {"p": 2}, {"d": 3}, error))
    return kept.spans


def test_the_request_is_a_child_of_the_caller_and_its_phases_are_its_children() -> None:
    *children, root = record(f"00-{TRACE_ID}-{PARENT_ID}-01")
    assert root.context is not None
    assert root.parent is not None
    assert root.name == "engine.request"
    assert root.kind is SpanKind.SERVER
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert [child.name for child in children] == NAMES
    for span in [*children, root]:
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert all(child.parent == root.context for child in children)
    assert len({span.context.span_id for span in [*children, root] if span.context}) == 6
    assert children[2].attributes == {"p": 2}
    assert children[3].attributes == {"d": 3}
    assert root.attributes is not None
    assert root.attributes["a"] == 1
    assert root.attributes["gen_ai.latency.time_in_model_prefill"] == 300e-9
    assert root.attributes["gen_ai.latency.e2e"] == 1000e-9


def test_without_a_parent_span_a_new_trace_starts() -> None:
    for header in (None, "garbage", f"00-{'0' * 32}-{PARENT_ID}-01"):
        root = record(header)[-1]
        assert root.parent is None


def test_an_unsampled_trace_costs_nothing() -> None:
    assert record(f"00-{TRACE_ID}-{PARENT_ID}-00") == []


def test_a_failure_marks_the_request() -> None:
    root = record(error="boom")[-1]
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "boom"


def test_a_request_that_never_ran_has_the_phases_that_it_reached() -> None:
    timings = EnginePhaseTimings(1_000, 0, 1_100, 0, 0, 0, 2_000)
    assert phases(timings) == [("engine.tokenize", 1_000, 1_100), ("engine.queue", 1_100, 2_000)]


def test_a_load_of_blocks_is_a_phase_of_its_own() -> None:
    *children, _ = record(timings=replace(TIMINGS, loading_ns=1_050))
    assert [child.name for child in children] == ["engine.tokenize", "engine.kv_load", *NAMES[1:]]
    assert children[1].attributes == {"l": 4}
    assert (children[1].start_time, children[1].end_time) == (1_050, 1_100)


@given(st.lists(st.integers(0, 100), min_size=5, max_size=5), st.integers(1, 50), st.integers(0, 50))
def test_phases_always_add_up_to_the_request(middle: list[int], received: int, length: int) -> None:
    loading, submitted, scheduled, first_token, last_token = middle
    ended = received + length
    found = phases(EnginePhaseTimings(received, loading, submitted, scheduled, first_token, last_token, ended))
    assert found[0][1] == received
    assert found[-1][2] == received + length
    assert all(start <= end for _, start, end in found)
    assert all(before[2] == after[1] for before, after in pairwise(found))


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_receives_the_tree() -> None:
    with collector() as (url, received):
        tracer = otlp_tracer(url)
        tracer.record(RequestTrace(TIMINGS, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}, {}, {}, {}, {}))
        tracer.shutdown()
    spans = [s for batch in received for r in batch.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert [span.name for span in spans] == [*NAMES, "engine.request"]
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert spans[-1].parent_span_id.hex() == PARENT_ID
    assert spans[-1].start_time_unix_nano == TIMINGS.received_ns
    service = received[0].resource_spans[0].resource.attributes
    assert any(item.value.string_value == "warmpath-engine" for item in service)
