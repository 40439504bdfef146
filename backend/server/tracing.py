"""Exports OpenTelemetry spans of a request: `engine.request` and its phases, from the request's phase timings.

The phases are contiguous, so their durations add up to the request's duration:

    engine.request      [received .................................................... ended]
      engine.tokenize   [received, submitted]
      engine.kv_load    before engine.queue, only if blocks of another engine are loaded
      engine.queue                [submitted, scheduled]
      engine.prefill                        [scheduled, first token]
      engine.decode                                   [first token, last token]
      engine.detokenize                                            [last token, ended]

A request that ends early has only the phases that it reached, and the last of these phases lasts until the end. Spans
are built after the response, so they add no latency. No spans are built for a trace that is not sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from backend.server import semconv

Attributes = Mapping[str, AttributeValue]
NANOSECONDS = 1_000_000_000
MAX_EXPORT_SECONDS = 3.0  # per batch with retries; an unreachable collector delays shutdown by this time
UNSET = Status(StatusCode.UNSET)
DEFAULT_SERVICE_NAME = "warmpath-engine"


@dataclass(frozen=True, slots=True)
class EnginePhaseTimings:
    """Times at which a request entered each phase, in nanoseconds since the epoch. 0: the phase was not reached."""

    received_ns: int
    loading_ns: int
    submitted_ns: int
    scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Timings, attributes and error of one finished request, from which its spans are built."""

    timings: EnginePhaseTimings
    headers: Mapping[str, str]  # of the HTTP request; `traceparent` names the parent span
    attributes: Attributes  # attributes of the span engine.request
    loading: Attributes
    prefill: Attributes
    decode: Attributes
    error: str | None = None


class Tracer:
    """Builds the spans of finished requests and passes them to `processor`. Without a processor, it does nothing."""

    def __init__(self, processor: SpanProcessor | None, service_name: str = DEFAULT_SERVICE_NAME) -> None:
        self._processor = processor
        self._resource = Resource.create({SERVICE_NAME: service_name})
        self._scope = InstrumentationScope("warmpath.engine")
        self._ids = RandomIdGenerator()
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestTrace) -> None:
        """Exports the spans of a request as a part of the caller's trace, or as a new trace if the caller has none.

        Does nothing if the caller's trace is not sampled.
        """
        if self._processor is None:
            return
        parent = get_current_span(self._propagator.extract(dict(record.headers))).get_span_context()
        if not parent.is_valid:
            root = self._context(self._ids.generate_trace_id())
        elif parent.trace_flags.sampled:
            root = self._context(parent.trace_id)
        else:
            return
        timings = record.timings
        latencies = _latencies(timings)
        status = Status(StatusCode.ERROR, record.error) if record.error else UNSET
        own = {**record.attributes, **latencies}
        for name, start_ns, end_ns in phases(timings):
            of_phases = {
                "engine.kv_load": record.loading,
                "engine.prefill": record.prefill,
                "engine.decode": record.decode,
            }
            attributes = of_phases.get(name, {})
            self._end(name, self._context(root.trace_id), root, SpanKind.INTERNAL, attributes, start_ns, end_ns)
        self._end(
            "engine.request",
            root,
            parent if parent.is_valid else None,
            SpanKind.SERVER,
            own,
            timings.received_ns,
            timings.ended_ns,
            status,
        )

    def shutdown(self) -> None:
        """Exports buffered spans. Blocks for at most the exporter's timeout."""
        if self._processor is not None:
            self._processor.shutdown()

    def _context(self, trace_id: int) -> SpanContext:
        return SpanContext(
            trace_id, self._ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )

    def _end(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Attributes,
        start_ns: int,
        end_ns: int,
        status: Status = UNSET,
    ) -> None:
        assert self._processor is not None
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                dict(attributes),
                kind=kind,
                status=status,
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )


def otlp_tracer(endpoint: str, service_name: str = DEFAULT_SERVICE_NAME) -> Tracer:
    """Returns a tracer that exports spans in batches over OTLP/HTTP, from its own thread.

    `endpoint` is a collector's base URL, such as http://localhost:4318.
    """
    path = "/v1/traces"
    base = endpoint.rstrip("/").removesuffix(path)
    exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")  # only now: it takes 40 ms
    span_exporter = exporter.OTLPSpanExporter(endpoint=base + path, timeout=MAX_EXPORT_SECONDS)
    return Tracer(BatchSpanProcessor(span_exporter), service_name)


def phases(timings: EnginePhaseTimings) -> list[tuple[str, int, int]]:
    """Returns (name, start, end) of each phase that the request reached, in nanoseconds.

    The phases are contiguous from `received_ns` to `ended_ns`. Two threads take the times, so each time is clamped to
    the range between its neighbours.
    """
    starts = [("engine.tokenize", timings.received_ns)]
    for name, reached_ns in (
        ("engine.kv_load", timings.loading_ns),
        ("engine.queue", timings.submitted_ns),
        ("engine.prefill", timings.scheduled_ns),
        ("engine.decode", timings.first_token_ns),
        ("engine.detokenize", timings.last_token_ns),
    ):
        if reached_ns:
            starts.append((name, min(max(reached_ns, starts[-1][1]), timings.ended_ns)))
    ends = [start for _, start in starts[1:]] + [timings.ended_ns]
    return [(name, start, end) for (name, start), end in zip(starts, ends, strict=True)]


def _latencies(timings: EnginePhaseTimings) -> dict[str, float]:
    """Returns vLLM's latency attributes, in seconds."""
    names = {
        "engine.queue": semconv.LATENCY_TIME_IN_QUEUE,
        "engine.prefill": semconv.LATENCY_TIME_IN_MODEL_PREFILL,
        "engine.decode": semconv.LATENCY_TIME_IN_MODEL_DECODE,
    }
    found = {names[name]: (end - start) / NANOSECONDS for name, start, end in phases(timings) if name in names}
    if timings.first_token_ns:
        found[semconv.LATENCY_TIME_TO_FIRST_TOKEN] = (timings.first_token_ns - timings.received_ns) / NANOSECONDS
    return {**found, semconv.LATENCY_E2E: (timings.ended_ns - timings.received_ns) / NANOSECONDS}
