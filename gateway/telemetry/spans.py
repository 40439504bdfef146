"""Builds the OpenTelemetry spans of a finished request, from the times noted while it ran.

The tree: a server span for the request, a span for each phase, a client span for the chat, and below it one client span
for each attempt. Spans are encoded as OTLP messages directly (`otlp.py`), not with the SDK, for two reasons. The SDK's
tracer chooses a span's id when the span starts, but the id of an attempt must already be sent upstream by then. Also,
the SDK creates span objects and uses a thread and an encoder, which costs a traced request many times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from urllib.parse import urlsplit

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from opentelemetry.sdk.resources import Resource

from gateway.telemetry import names, otlp
from gateway.telemetry.otlp import Attributes
from gateway.telemetry.propagation import new_span_id
from gateway.telemetry.record import CallRecord, Phase
from gateway.types import Attempt, Call, Outcome, Usage

ATTEMPT_OK = "ok"

EncodeSpan = Callable[..., bytes]

_BROKEN = frozenset({Outcome.UPSTREAM_CUT, Outcome.TIMEOUT})
_NOT_FAILED = frozenset({ATTEMPT_OK, Outcome.CLIENT_GONE.value})
# The encoding of these attributes is not cached: their values differ in nearly every request, or clients choose them.
_UNCACHED = frozenset({
    names.WARMPATH_CALL_ID, names.WARMPATH_EVENT_ID, names.WARMPATH_ROUTE_REASON, names.GEN_AI_RESPONSE_ID,
    names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, names.OPENAI_REQUEST_SERVICE_TIER,
})  # fmt: skip
_INT64_MAX = (1 << 63) - 1  # OTLP cannot encode larger integers


class SpanBuilder:
    """Builds the spans of requests. `version` and `replica` describe the service in the spans' resource."""

    def __init__(self, version: str, replica: str) -> None:
        service = {names.SERVICE_NAME: "warmpath-gateway", names.SERVICE_VERSION: version}
        resource = Resource.create(service | ({names.SERVICE_INSTANCE_ID: replica} if replica else {}))
        self._resource = ResourceMessage(
            attributes=[
                KeyValue(key=name, value=AnyValue(string_value=str(value)))
                for name, value in resource.attributes.items()
            ]
        )
        self._scope = InstrumentationScope(name="warmpath.gateway", version=version)

    def envelope(self, spans: Sequence[bytes]) -> bytes:
        """An encoded `ExportTraceServiceRequest` that contains these spans."""
        # In protobuf, a repeated field is the concatenation of its members, each with its tag and length in front.
        scoped = ScopeSpans(scope=self._scope).SerializeToString() + b"".join([otlp.field(2, span) for span in spans])
        return otlp.field(1, ResourceSpans(resource=self._resource).SerializeToString() + otlp.field(2, scoped))

    def build(self, record: CallRecord, phases: Sequence[Phase]) -> list[bytes]:
        """The encoded spans of a request."""
        trace, timings = record.trace, record.timings
        span = partial(_span, otlp.trace_fields(trace.trace_id.to_bytes(16), trace.tracestate))
        server_id = record.server_span_id.to_bytes(8)
        server = span(
            server_id,
            f"{record.method} {record.path}",
            trace.parent_span_id.to_bytes(8) if trace.parent_span_id else b"",
            (timings.started_ns, phases[-1].end_ns if phases else max(timings.started_ns, timings.ended_ns)),
            _server_attributes(record),
            kind=Span.SPAN_KIND_SERVER,
            remote_parent=bool(trace.parent_span_id),
            failed=record.status >= 500 or record.outcome in _BROKEN,
        )
        spans = [server]
        chat_id = server_id  # without a chat span, phases and attempts are children of the server span
        if record.call is not None and any(phase.name == names.CHAT_PHASE for phase in phases):
            chat_id = new_span_id().to_bytes(8)
            spans.append(self._chat(span, chat_id, server_id, record, record.call, phases))
            spans += self._attempts(span, chat_id, record.attempts, record.call)
        rejecting = _rejecting_phase(record, phases)
        for phase in phases:
            if phase.name == names.CHAT_PHASE:
                continue
            attributes = _phase_attributes(phase.name, record)
            if phase is rejecting:
                attributes[names.ERROR_TYPE] = _error_type(record)
            parent_id = chat_id if phase.within_chat else server_id
            interval = (phase.start_ns, phase.end_ns)
            spans.append(span(new_span_id().to_bytes(8), phase.name, parent_id, interval, attributes))
        return spans

    def _chat(
        self,
        span: EncodeSpan,
        chat_id: bytes,
        server_id: bytes,
        record: CallRecord,
        call: Call,
        phases: Sequence[Phase],
    ) -> bytes:
        interval = next((p.start_ns, p.end_ns) for p in phases if p.name == names.CHAT_PHASE)
        failed = record.outcome is not Outcome.COMPLETE and record.outcome is not Outcome.CLIENT_GONE
        attributes = _gen_ai_attributes(record, call, interval[0])
        if failed:
            attributes[names.ERROR_TYPE] = _error_type(record)
        first_chunk_ns = record.timings.first_chunk_ns
        return span(
            chat_id,
            f"{names.GEN_AI_OPERATIONS[call.operation]} {call.asked_model}",
            server_id,
            interval,
            attributes,
            kind=Span.SPAN_KIND_CLIENT,
            failed=failed,
            event=otlp.event(names.FIRST_CHUNK_EVENT, first_chunk_ns) if first_chunk_ns else b"",
        )

    def _attempts(self, span: EncodeSpan, chat_id: bytes, attempts: Sequence[Attempt], call: Call) -> Iterator[bytes]:
        for resend_count, attempt in enumerate(attempts):
            yield span(
                attempt.span_id.to_bytes(8),
                names.ATTEMPT_SPAN,
                chat_id,
                (attempt.started_ns, max(attempt.started_ns, attempt.ended_ns)),
                _attempt_attributes(attempt, call, resend_count),
                kind=Span.SPAN_KIND_CLIENT,
                failed=attempt.outcome not in _NOT_FAILED,
            )


def _span(
    trace: bytes,
    span_id: bytes,
    name: str,
    parent_span_id: bytes,
    interval_ns: tuple[int, int],
    attributes: Attributes,
    *,
    kind: int = Span.SPAN_KIND_INTERNAL,
    remote_parent: bool = False,
    failed: bool = False,
    event: bytes = b"",
) -> bytes:
    # Most attributes have the same value in many traces, so their encoding is cached.
    encoded = [
        (otlp.attribute if name in _UNCACHED else _cached_attribute)(type(value), name, value)
        for name, value in attributes.items()
    ]
    return otlp.span(
        trace, span_id, name, parent_span_id, interval_ns, encoded,
        kind=kind, remote_parent=remote_parent, failed=failed, event=event,
    )  # fmt: skip


_cached_attribute = lru_cache(maxsize=4096)(otlp.attribute)


def _rejecting_phase(record: CallRecord, phases: Sequence[Phase]) -> Phase | None:
    """The phase in which a request was rejected before it was sent to an upstream: the last one before `settle`."""
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
            attributes[names.WARMPATH_PROMPT_TOKENS_ESTIMATE] = call.input_tokens_estimate
            if call.class_rule is not None:
                attributes[names.WARMPATH_CLASS_RULE] = call.class_rule
        case "cache.lookup" | names.REPLAY_SPAN:
            attributes[names.WARMPATH_CACHE] = record.cache
        case names.QUEUE_PHASE if call is not None:
            attributes[names.WARMPATH_CLASS] = call.class_name
        case "route":
            if (reason := record.route_reason) is not None:
                attributes[names.WARMPATH_ROUTE_REASON] = reason
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
    target = record.deployment or (record.attempts[-1].deployment if record.attempts else None)
    if target is not None and (deployment := call.policy.deployments_by_name.get(target)):
        attributes[names.GEN_AI_PROVIDER_NAME] = deployment.provider
        if record.deployment is not None:
            attributes[names.GEN_AI_RESPONSE_MODEL] = deployment.model
    if record.response_id is not None:
        attributes[names.GEN_AI_RESPONSE_ID] = record.response_id
    if record.finish_reasons:
        attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = tuple(record.finish_reasons)
    if record.timings.first_chunk_ns:
        attributes[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = (record.timings.first_chunk_ns - opened_ns) / 1e9
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
        attributes |= _url_attributes(deployment.base_url, call.operation.value)
    return attributes


@lru_cache(maxsize=256)  # mostly one for each deployment and endpoint
def _url_attributes(base_url: str, endpoint: str) -> Attributes:
    url = urlsplit(base_url)
    host = url.hostname or ""
    port = url.port or (443 if url.scheme == "https" else 80)
    # Rebuilt from its parts: a base URL may contain a user and a password.
    full = f"{url.scheme}://{host}:{port}{url.path.rstrip('/')}/{endpoint}"
    return {names.SERVER_ADDRESS: host, names.SERVER_PORT: port, names.URL_FULL: full}
