"""Builds the OpenTelemetry spans of a finished request, from the times noted while it ran.

The tree: a server span for the request, a span for each phase, a client span for the chat, and below it one client span
for each attempt. Spans are encoded as OTLP messages directly (`otlp.py`), not with the SDK, for two reasons. The SDK's
tracer chooses a span's id when the span starts, but the id of an attempt must already be sent upstream by then. Also,
the SDK creates span objects and uses a thread and an encoder, which costs a traced request many times as much.

The parts of spans that many requests have in common are encoded once for each `_Shape`. For each request they are
joined with the ids, the times, and the attributes that only this request has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from opentelemetry.sdk.resources import Resource

from gateway.core.kv_transfer import PREFILLED
from gateway.policy import Policy
from gateway.policy.roles import PREFILL
from gateway.telemetry import names, otlp
from gateway.telemetry.otlp import Attributes
from gateway.telemetry.propagation import new_span_id, new_span_ids
from gateway.telemetry.record import CallRecord, Phase
from gateway.types import Attempt, Call, Outcome, Usage

ATTEMPT_OK = "ok"

_BROKEN = frozenset({Outcome.UPSTREAM_CUT, Outcome.TIMEOUT})
_NOT_FAILED = frozenset({ATTEMPT_OK, PREFILLED, Outcome.CLIENT_GONE.value})
# The encoding of these attributes is not cached: their values differ in nearly every request, or clients choose them.
_UNCACHED = frozenset({
    names.WARMPATH_EVENT_ID, names.WARMPATH_ROUTE_REASON, names.GEN_AI_RESPONSE_ID,
    names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, names.OPENAI_REQUEST_SERVICE_TIER,
})  # fmt: skip
_INT64_MAX = (1 << 63) - 1  # OTLP cannot encode larger integers
SHAPES_MAX = 1024  # that are kept for one policy; all calls of one key, model and deployment that end alike share one


class _Shape(NamedTuple):
    """The encoded parts of a request's spans that do not depend on its ids, times and own attributes."""

    server: bytes
    chat: bytes  # empty if there is no chat span
    chat_at: int  # which phase the chat is
    attempts: tuple[bytes, ...]
    phases: tuple[bytes, ...]  # one for each phase, empty for the chat


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
        self._policy: Policy | None = None  # of the last call
        self._shapes: dict[tuple[object, ...], _Shape] = {}  # under that policy

    def envelope(self, spans: Sequence[bytes]) -> bytes:
        """An encoded `ExportTraceServiceRequest` that contains these spans."""
        # In protobuf, a repeated field is the concatenation of its members, each with its tag and length in front.
        scoped = ScopeSpans(scope=self._scope).SerializeToString() + b"".join([otlp.field(2, span) for span in spans])
        return otlp.field(1, ResourceSpans(resource=self._resource).SerializeToString() + otlp.field(2, scoped))

    def build(self, record: CallRecord, phases: Sequence[Phase]) -> list[bytes]:
        """The encoded spans of a request."""
        trace, timings, call, shape = record.trace, record.timings, record.call, self._shape_of(record, phases)
        span = partial(otlp.span, otlp.trace_fields(trace.trace_id.to_bytes(16), trace.tracestate))
        server_id = record.server_span_id.to_bytes(8)
        server = span(
            server_id,
            trace.parent_span_id.to_bytes(8) if trace.parent_span_id else b"",
            timings.started_ns,
            phases[-1].end_ns if phases else max(timings.started_ns, timings.ended_ns),
            shape.server,
            b"" if call is None else otlp.attribute(str, names.WARMPATH_CALL_ID, call.id),
        )
        spans = [server]
        chat_id = server_id  # without a chat span, phases and attempts are children of the server span
        if call is not None and shape.chat:
            chat_id = new_span_id().to_bytes(8)
            _, opened_ns, settled_ns, _ = phases[shape.chat_at]
            first_chunk_ns = timings.first_chunk_ns
            own = _encoded(_own_gen_ai_attributes(record, call, opened_ns))
            event = otlp.event(names.FIRST_CHUNK_EVENT, first_chunk_ns) if first_chunk_ns else b""
            spans.append(span(chat_id, server_id, opened_ns, settled_ns, shape.chat, own, event))
            for attempt, constant in zip(record.attempts, shape.attempts, strict=True):
                started_ns = attempt.started_ns
                own = _cached_attribute(int, names.WARMPATH_PREDICTED_CACHED_TOKENS, attempt.predicted_cached_tokens)
                if attempt.blocks_from is not None:
                    own += _cached_attribute(str, names.WARMPATH_BLOCKS_FROM, attempt.blocks_from)
                if attempt.outcome == PREFILLED and attempt.unbilled is not None:
                    own += _encoded(_usage_attributes(attempt.unbilled))
                ended_ns = max(started_ns, attempt.ended_ns)
                spans.append(span(attempt.span_id.to_bytes(8), chat_id, started_ns, ended_ns, constant, own))
        for phase, constant, span_id in zip(phases, shape.phases, new_span_ids(len(phases)), strict=True):
            name, start_ns, end_ns, within_chat = phase
            if name == names.CHAT_PHASE:
                continue
            read_own = _PHASE_ATTRIBUTES.get(name, _NO_ATTRIBUTES)[1]
            own = b"" if read_own is None else _encoded(read_own(record))
            spans.append(span(span_id, chat_id if within_chat else server_id, start_ns, end_ns, constant, own))
        return spans

    def _shape_of(self, record: CallRecord, phases: Sequence[Phase]) -> _Shape:
        """The request's shape, encoded or from the cache. The key has whatever `_encode_shape` reads."""
        call, principal = record.call, record.principal
        if call is not None and call.policy is not self._policy:
            self._policy = call.policy
            self._shapes.clear()
        key = (
            tuple([phase[0] for phase in phases]),
            tuple([(attempt.deployment, attempt.outcome, attempt.status) for attempt in record.attempts]),
            record.trace.parent_span_id != 0, record.method, record.path, record.status, record.cache, record.outcome,
            record.error_code, record.deployment, tuple(record.finish_reasons),
            None if principal is None else (principal.tenant_name, principal.key_id),
            None if call is None else (
                call.operation, call.asked_model, call.stream, call.canonical_steps, call.class_rule, call.class_name,
                call.wildcard,
            ),
        )  # fmt: skip
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= SHAPES_MAX:
                self._shapes.clear()
            shape = self._shapes[key] = _encode_shape(record, phases)
        return shape


def _encode_shape(record: CallRecord, phases: Sequence[Phase]) -> _Shape:
    call = record.call
    server = _constant(
        f"{record.method} {record.path}",
        _server_attributes(record),
        kind=Span.SPAN_KIND_SERVER,
        remote_parent=bool(record.trace.parent_span_id),
        failed=record.status >= 500 or record.outcome in _BROKEN,
    )
    chat, chat_at, attempts = b"", -1, list[bytes]()
    if call is not None and names.CHAT_PHASE in (phase_names := [phase.name for phase in phases]):
        chat_at = phase_names.index(names.CHAT_PHASE)
        failed = record.outcome is not Outcome.COMPLETE and record.outcome is not Outcome.CLIENT_GONE
        attributes = _gen_ai_attributes(record, call)
        if failed:
            attributes[names.ERROR_TYPE] = _error_type(record)
        name = f"{names.GEN_AI_OPERATIONS[call.operation]} {call.asked_model}"
        chat = _constant(name, attributes, kind=Span.SPAN_KIND_CLIENT, failed=failed)
        attempts = _encode_attempts(record.attempts, call)
    rejecting = _rejecting_phase(record, phases)
    encoded: list[bytes] = []
    for phase in phases:
        attributes = _PHASE_ATTRIBUTES.get(phase.name, _NO_ATTRIBUTES)[0](record)
        if phase is rejecting:
            attributes = {**attributes, names.ERROR_TYPE: _error_type(record)}
        encoded.append(b"" if phase.name == names.CHAT_PHASE else _constant(phase.name, attributes))
    return _Shape(server, chat, chat_at, tuple(attempts), tuple(encoded))


def _encode_attempts(attempts: Sequence[Attempt], call: Call) -> list[bytes]:
    """The parts of the attempts' spans that all requests of a shape have in common."""
    encoded, resend_count = list[bytes](), 0
    for attempt in attempts:
        deployment = call.policy.deployment(attempt.deployment)
        is_prefill = deployment is not None and deployment.role == PREFILL
        attributes = _attempt_attributes(attempt, call, 0 if is_prefill else resend_count)
        name, failed = names.PREFILL_SPAN if is_prefill else names.ATTEMPT_SPAN, attempt.outcome not in _NOT_FAILED
        encoded.append(_constant(name, attributes, kind=Span.SPAN_KIND_CLIENT, failed=failed))
        resend_count += not is_prefill
    return encoded


def _constant(
    name: str,
    attributes: Attributes,
    *,
    kind: int = Span.SPAN_KIND_INTERNAL,
    remote_parent: bool = False,
    failed: bool = False,
) -> bytes:
    """The part of a span that all requests of a shape have in common."""
    encoded = [otlp.attribute(type(value), name, value) for name, value in attributes.items()]
    return otlp.constant_fields(name, encoded, kind=kind, remote_parent=remote_parent, failed=failed)


def _encoded(attributes: Attributes) -> bytes:
    """Attributes whose values differ between requests. Some, like token counts, often have the same value."""
    return b"".join([
        (otlp.attribute if name in _UNCACHED else _cached_attribute)(type(value), name, value)
        for name, value in attributes.items()
    ])  # fmt: skip


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
        attributes[names.WARMPATH_TENANT] = record.principal.tenant_name
        attributes[names.WARMPATH_KEY_ID] = record.principal.key_id
    if record.call is not None:
        attributes[names.WARMPATH_POLICY_HASH] = record.call.policy.hash
    if record.outcome is not None:
        attributes[names.WARMPATH_OUTCOME] = record.outcome.value
    if record.deployment is not None:
        attributes[names.WARMPATH_DEPLOYMENT] = record.deployment
    return attributes


def _canonicalise_attributes(record: CallRecord) -> Attributes:
    call = record.call
    if call is None:
        return {}
    steps: Attributes = {names.WARMPATH_CANONICAL_STEPS: call.canonical_steps}
    return steps if call.class_rule is None else {**steps, names.WARMPATH_CLASS_RULE: call.class_rule}


def _own_canonicalise_attributes(record: CallRecord) -> Attributes:
    call = record.call
    return {} if call is None else {names.WARMPATH_PROMPT_TOKENS_ESTIMATE: call.input_tokens_estimate}


def _cache_attributes(record: CallRecord) -> Attributes:
    return {names.WARMPATH_CACHE: record.cache}


def _queue_attributes(record: CallRecord) -> Attributes:
    return {} if record.call is None else {names.WARMPATH_CLASS: record.call.class_name}


def _route_attributes(record: CallRecord) -> Attributes:
    return {} if record.deployment is None else {names.WARMPATH_DEPLOYMENT: record.deployment}


def _own_route_attributes(record: CallRecord) -> Attributes:
    attributes: Attributes = {}
    if (reason := record.route_reason) is not None:
        attributes[names.WARMPATH_ROUTE_REASON] = reason
    if record.deployment is not None:
        attributes[names.WARMPATH_PREDICTED_CACHED_TOKENS] = record.predicted_cached_tokens
    return attributes


def _own_settle_attributes(record: CallRecord) -> Attributes:
    return {} if record.event_id is None else {names.WARMPATH_EVENT_ID: record.event_id}


def _no_attributes(_: CallRecord) -> Attributes:
    return {}


# For each phase: the attributes that many requests have in common, and those whose values are one request's alone.
_ReadAttributes = Callable[[CallRecord], Attributes]
_NO_ATTRIBUTES: tuple[_ReadAttributes, _ReadAttributes | None] = (_no_attributes, None)
_PHASE_ATTRIBUTES: dict[str, tuple[_ReadAttributes, _ReadAttributes | None]] = {
    "canonicalise": (_canonicalise_attributes, _own_canonicalise_attributes),
    "cache.lookup": (_cache_attributes, None),
    names.REPLAY_SPAN: (_cache_attributes, None),
    names.QUEUE_PHASE: (_queue_attributes, None),
    "route": (_route_attributes, _own_route_attributes),
    names.SETTLE_PHASE: (_no_attributes, _own_settle_attributes),
}


def _gen_ai_attributes(record: CallRecord, call: Call) -> Attributes:
    attributes: Attributes = {
        names.GEN_AI_OPERATION_NAME: names.GEN_AI_OPERATIONS[call.operation],
        names.GEN_AI_REQUEST_MODEL: call.asked_model,
        names.GEN_AI_REQUEST_STREAM: call.stream,
    }
    target = record.deployment or (record.attempts[-1].deployment if record.attempts else None)
    if target is not None and (deployment := call.policy.deployment(target)):
        attributes[names.GEN_AI_PROVIDER_NAME] = deployment.provider
        if record.deployment is not None:
            attributes[names.GEN_AI_RESPONSE_MODEL] = deployment.model_for(call.wildcard)
    if record.finish_reasons:
        attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = tuple(record.finish_reasons)
    return attributes


def _own_gen_ai_attributes(record: CallRecord, call: Call, opened_ns: int) -> Attributes:
    """The attributes of a chat whose values are those of this request alone."""
    attributes: Attributes = {}
    if call.max_output_tokens is not None:
        attributes[names.GEN_AI_REQUEST_MAX_TOKENS] = call.max_output_tokens
    for field, name in names.GEN_AI_REQUEST_NUMBERS.items():
        if field in call.fields:
            value = msgspec.json.decode(call.fields[field])
            if type(value) is float or (type(value) is int and abs(value) <= _INT64_MAX):
                attributes[name] = value
    if call.service_tier is not None:
        attributes[names.OPENAI_REQUEST_SERVICE_TIER] = call.service_tier
    if record.response_id is not None:
        attributes[names.GEN_AI_RESPONSE_ID] = record.response_id
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
    }
    if resend_count:
        attributes[names.HTTP_REQUEST_RESEND_COUNT] = resend_count
    if attempt.status is not None:
        attributes[names.HTTP_RESPONSE_STATUS_CODE] = attempt.status
    if attempt.outcome not in (ATTEMPT_OK, PREFILLED):
        attributes[names.ERROR_TYPE] = attempt.outcome
    if deployment := call.policy.deployment(attempt.deployment):
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
