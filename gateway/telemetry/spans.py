"""A finished request as OpenTelemetry spans, built after the reply from the times noted on the way.

The SDK's tracer is not used: it chooses ids when a span starts, and an attempt's id has been sent upstream by then;
and a span that is open costs ten times one that is built at once. What the SDK does is batch, encode and send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from gateway.telemetry import names
from gateway.telemetry.propagation import new_span_id
from gateway.telemetry.record import CallRecord, Phase
from gateway.types import Attempt, Call, Outcome, Usage

SPANS_WAITING_MAX = 8192  # more are dropped, and counted
SPANS_PER_EXPORT_MAX = 256  # encoding holds the interpreter lock, some 20 us a span
EXPORT_INTERVAL_SECONDS = 2.0
EXPORT_TIMEOUT_SECONDS = 5.0  # of one batch, its retries included
FLUSH_TIMEOUT_SECONDS = 5.0  # at shutdown; the batch then under way may take its EXPORT_TIMEOUT_SECONDS on top

ATTEMPT_OK = "ok"

Attributes = dict[str, AttributeValue]
Draw = Callable[..., ReadableSpan]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_ERROR = Status(StatusCode.ERROR)
_UNSET = Status(StatusCode.UNSET)
_BROKEN = frozenset({Outcome.UPSTREAM_CUT, Outcome.TIMEOUT})
_NOT_FAILED = frozenset({ATTEMPT_OK, Outcome.CLIENT_GONE.value})
_INT64_MAX = (1 << 63) - 1  # a larger number has no encoding, and the exporter would log a stack trace


class SpanQueue:
    """Spans on their way out, at most SPANS_WAITING_MAX; exported by a thread that lives from `start` to `close`."""

    def __init__(self, otlp_endpoint: str, export_interval_seconds: float = EXPORT_INTERVAL_SECONDS) -> None:
        url = otlp_endpoint.rstrip("/")
        self._exporter = _Counting(
            OTLPSpanExporter(
                endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces", timeout=EXPORT_TIMEOUT_SECONDS
            )
        )
        self._interval_seconds = export_interval_seconds
        self._processor: BatchSpanProcessor | None = None
        self._accepted = 0
        self._overflowed = 0

    @property
    def dropped(self) -> int:
        """Spans that never arrived: refused by a full queue, or lost in a failed export."""
        return self._overflowed + self._exporter.failed

    @property
    def open(self) -> bool:
        return self._processor is not None

    def start(self) -> None:
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=SPANS_WAITING_MAX,
            schedule_delay_millis=self._interval_seconds * 1000,
            max_export_batch_size=SPANS_PER_EXPORT_MAX,
        )

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """All of a request's spans or none. The processor would drop its oldest silently; this bound comes first."""
        waiting = self._accepted - self._exporter.taken
        if self._processor is None or waiting + len(spans) > SPANS_WAITING_MAX:
            self._overflowed += len(spans)
            return
        self._accepted += len(spans)
        for span in spans:
            self._processor.on_end(span)

    async def close(self) -> None:
        processor, self._processor = self._processor, None
        if processor is None:
            return
        self._exporter.deadline = time.monotonic() + FLUSH_TIMEOUT_SECONDS
        await asyncio.to_thread(processor.shutdown)


class _Counting(SpanExporter):
    """Counts what the exporter takes and loses, which the SDK does not tell; past `deadline` it loses all."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken = 0
        self.failed = 0
        self.deadline = float("inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        if time.monotonic() < self.deadline:
            result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class SpanBuilder:
    """Turns a record into its tree: the request, its phases, the chat, and the attempts within it."""

    def __init__(self, version: str, replica: str) -> None:
        service = {names.SERVICE_NAME: "warmpath-gateway", names.SERVICE_VERSION: version}
        self._resource = Resource.create(service | ({names.SERVICE_INSTANCE_ID: replica} if replica else {}))
        self._scope = InstrumentationScope("warmpath.gateway", version)

    def build(self, record: CallRecord, phases: Sequence[Phase]) -> list[ReadableSpan]:
        trace, marks = record.trace, record.marks
        state = TraceState.from_header([trace.tracestate]) if trace.tracestate else TraceState()
        span = partial(self._span, trace.trace_id, state)

        caller = SpanContext(trace.trace_id, trace.parent_span_id, is_remote=True) if trace.parent_span_id else None
        server = span(
            f"{record.method} {record.path}",
            caller,
            (marks.started_ns, phases[-1].end_ns if phases else max(marks.started_ns, marks.ended_ns)),
            _server_attributes(record),
            kind=SpanKind.SERVER,
            span_id=record.server_span_id,
            failed=record.status >= 500 or record.outcome in _BROKEN,
        )
        spans = [server]
        chat = None
        if record.call is not None and any(phase.name == names.CHAT_PHASE for phase in phases):
            chat = self._chat(span, server, record, record.call, phases)
            spans += [chat, *self._attempts(span, chat, record.attempts, record.call)]
        refusing = _refusing_phase(record, phases)
        for phase in phases:
            if phase.name == names.CHAT_PHASE:
                continue
            attributes = _phase_attributes(phase.name, record)
            if phase is refusing:
                attributes[names.ERROR_TYPE] = _error_type(record)
            parent = chat if chat is not None and phase.within_chat else server
            spans.append(span(phase.name, parent.context, (phase.start_ns, phase.end_ns), attributes))
        return spans

    def _chat(
        self, span: Draw, server: ReadableSpan, record: CallRecord, call: Call, phases: Sequence[Phase]
    ) -> ReadableSpan:
        interval = next((p.start_ns, p.end_ns) for p in phases if p.name == names.CHAT_PHASE)
        failed = record.outcome is not Outcome.COMPLETE and record.outcome is not Outcome.CLIENT_GONE
        attributes = _gen_ai_attributes(record, call, interval[0])
        if failed:
            attributes[names.ERROR_TYPE] = _error_type(record)
        first_chunk_ns = record.marks.first_chunk_ns
        return span(
            f"{names.GEN_AI_OPERATIONS[call.operation]} {call.asked_model}",
            server.context,
            interval,
            attributes,
            kind=SpanKind.CLIENT,
            failed=failed,
            events=(Event(names.FIRST_CHUNK_EVENT, timestamp=first_chunk_ns),) if first_chunk_ns else (),
        )

    def _attempts(
        self, span: Draw, chat: ReadableSpan, attempts: Sequence[Attempt], call: Call
    ) -> Iterator[ReadableSpan]:
        for resend_count, attempt in enumerate(attempts):
            yield span(
                names.ATTEMPT_SPAN,
                chat.context,
                (attempt.started_ns, max(attempt.started_ns, attempt.ended_ns)),
                _attempt_attributes(attempt, call, resend_count),
                kind=SpanKind.CLIENT,
                span_id=attempt.span_id,
                failed=attempt.outcome not in _NOT_FAILED,
            )

    def _span(
        self,
        trace_id: int,
        state: TraceState,
        name: str,
        parent: SpanContext | None,
        interval_ns: tuple[int, int],
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        span_id: int = 0,
        failed: bool = False,
        events: Sequence[Event] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=SpanContext(trace_id, span_id or new_span_id(), False, _SAMPLED, state),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=events,
            kind=kind,
            status=_ERROR if failed else _UNSET,
            start_time=interval_ns[0],
            end_time=interval_ns[1],
            instrumentation_scope=self._scope,
        )


def _refusing_phase(record: CallRecord, phases: Sequence[Phase]) -> Phase | None:
    """Where a request that no upstream was asked for came to its end: the last phase before it was settled."""
    if record.status < 400 or record.attempts:
        return None
    return next((phase for phase in reversed(phases) if phase.name != names.SETTLE_PHASE), None)


def _error_type(record: CallRecord) -> str:
    if record.error_code is not None:
        return record.error_code
    if record.outcome is not None and record.outcome is not Outcome.COMPLETE:
        return str(record.outcome.value)
    return str(record.status)


def _server_attributes(record: CallRecord) -> Attributes:
    attributes: Attributes = {
        names.HTTP_REQUEST_METHOD: record.method,
        names.HTTP_ROUTE: record.path,
        names.URL_PATH: record.path,
        names.HTTP_RESPONSE_STATUS_CODE: record.status,
        names.WARMPATH_CACHE: record.cache,
    }
    if record.status >= 400 or record.outcome in _BROKEN:
        attributes[names.ERROR_TYPE] = _error_type(record)
    if record.principal is not None:
        attributes[names.WARMPATH_TENANT] = record.principal.tenant.name
        attributes[names.WARMPATH_KEY_ID] = record.principal.key_id
    if record.call is not None:
        attributes[names.WARMPATH_CALL_ID] = record.call.id
        attributes[names.WARMPATH_POLICY_HASH] = record.call.policy.hash
    if record.outcome is not None:
        attributes[names.WARMPATH_OUTCOME] = record.outcome.value
    if record.deployment is not None:
        attributes[names.WARMPATH_DEPLOYMENT] = record.deployment
    return attributes


def _phase_attributes(phase: str, record: CallRecord) -> Attributes:
    attributes: Attributes = {}
    call = record.call
    match phase:
        case "canonicalise" if call is not None:
            attributes[names.WARMPATH_CANONICAL_STEPS] = call.canonical_steps
            attributes[names.WARMPATH_PROMPT_TOKENS_ESTIMATE] = call.prompt_tokens_estimate
            if call.class_rule is not None:
                attributes[names.WARMPATH_CLASS_RULE] = call.class_rule
        case "cache.lookup" | names.REPLAY_SPAN:
            attributes[names.WARMPATH_CACHE] = record.cache
        case names.QUEUE_PHASE if call is not None:
            attributes[names.WARMPATH_CLASS] = call.class_name
        case "route":
            if record.route_reason is not None:
                attributes[names.WARMPATH_ROUTE_REASON] = record.route_reason
            if record.deployment is not None:
                attributes[names.WARMPATH_DEPLOYMENT] = record.deployment
                attributes[names.WARMPATH_PREDICTED_CACHED_TOKENS] = record.predicted_cached_tokens
        case names.SETTLE_PHASE if record.event_id is not None:
            attributes[names.WARMPATH_EVENT_ID] = record.event_id
    return attributes


def _gen_ai_attributes(record: CallRecord, call: Call, opened_ns: int) -> Attributes:
    attributes: Attributes = {
        names.GEN_AI_OPERATION_NAME: names.GEN_AI_OPERATIONS[call.operation],
        names.GEN_AI_REQUEST_MODEL: call.asked_model,
        names.GEN_AI_REQUEST_STREAM: call.stream,
    }
    if call.max_output_tokens is not None:
        attributes[names.GEN_AI_REQUEST_MAX_TOKENS] = call.max_output_tokens
    for field, name in names.GEN_AI_REQUEST_NUMBERS.items():
        if field in call.fields:
            value = msgspec.json.decode(call.fields[field])
            if type(value) is float or (type(value) is int and abs(value) <= _INT64_MAX):
                attributes[name] = value
    if call.service_tier is not None:
        attributes[names.OPENAI_REQUEST_SERVICE_TIER] = call.service_tier
    asked = record.deployment or (record.attempts[-1].deployment if record.attempts else None)
    if asked is not None and (deployment := call.policy.deployments_by_name.get(asked)):
        attributes[names.GEN_AI_PROVIDER_NAME] = deployment.provider
        if record.deployment is not None:
            attributes[names.GEN_AI_RESPONSE_MODEL] = deployment.model
    if record.response_id is not None:
        attributes[names.GEN_AI_RESPONSE_ID] = record.response_id
    if record.finish_reasons:
        attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = tuple(record.finish_reasons)
    if record.marks.first_chunk_ns:
        attributes[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = (record.marks.first_chunk_ns - opened_ns) / 1e9
    if record.usage is not None:
        attributes |= _usage_attributes(record.usage)
    return attributes


def _usage_attributes(usage: Usage) -> Attributes:
    return {
        names.GEN_AI_USAGE_INPUT_TOKENS: usage.input,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: usage.output,
        names.GEN_AI_USAGE_CACHE_READ: usage.cache_read,
        **dict.fromkeys(names.GEN_AI_USAGE_CACHE_WRITE, usage.cache_write),
        names.GEN_AI_USAGE_REASONING: usage.reasoning,
        names.WARMPATH_USAGE_EXACT: usage.exact,
    }


def _attempt_attributes(attempt: Attempt, call: Call, resend_count: int) -> Attributes:
    attributes: Attributes = {
        names.HTTP_REQUEST_METHOD: "POST",
        names.WARMPATH_DEPLOYMENT: attempt.deployment,
        names.WARMPATH_PREDICTED_CACHED_TOKENS: attempt.predicted_cached_tokens,
    }
    if resend_count:
        attributes[names.HTTP_REQUEST_RESEND_COUNT] = resend_count
    if attempt.status is not None:
        attributes[names.HTTP_RESPONSE_STATUS_CODE] = attempt.status
    if attempt.outcome != ATTEMPT_OK:
        attributes[names.ERROR_TYPE] = attempt.outcome
    if deployment := call.policy.deployments_by_name.get(attempt.deployment):
        url = urlsplit(deployment.base_url)
        host = url.hostname or ""
        port = url.port or (443 if url.scheme == "https" else 80)
        attributes[names.SERVER_ADDRESS] = host
        attributes[names.SERVER_PORT] = port
        # Put together anew: a base URL may hold a user and a password.
        attributes[names.URL_FULL] = f"{url.scheme}://{host}:{port}{url.path.rstrip('/')}/{call.operation.value}"
    return attributes
