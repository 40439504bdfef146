"""Phase 2: canonicalises and fingerprints a parsed prompt, chooses its latency class, and builds the `Call`.

The endpoint's body reader parses and checks the fields that the gateway acts on; other fields stay as they came.
`CallerContexts` has what the calls of one key for one model have in common. `TransformPipeline` brings the prompt into
its canonical form, as far as the policy allows. Then the prompt is fingerprinted, and the policy's first matching rule
selects the latency class.

`canonicalise` never waits. `load_and_canonicalise` first reads from the storage what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from gateway.core.cache_breakpoints import without_breakpoint
from gateway.core.deadlines import TIMEOUT_HEADERS, read_timeout_seconds, total_timeout_seconds
from gateway.core.errors import BadRequest
from gateway.core.ids import random_bytes
from gateway.core.native_requests import NativeRequest
from gateway.core.worker_thread import in_thread
from gateway.policy import Model, Policy, Tenant, TenantLimits
from gateway.prefix.fingerprint import FingerprintCache
from gateway.prompts.caller_contexts import CallerContext, CallerContexts
from gateway.prompts.large_bodies import check_and_parse, is_large, parse
from gateway.prompts.matching import Headers
from gateway.prompts.media.calibration import MediaCalibration
from gateway.prompts.media.counting import Piece, count_pieces
from gateway.prompts.model_choice import choose_deployment
from gateway.prompts.reader import MAX_TOKENS, BodyReader, Fields, Metadata, NativeReader, ParsedBody, decode
from gateway.prompts.sessions import SESSION_HEADERS, conversation_of, session_of
from gateway.prompts.transforms import CanonicalBody, DecisionNotLoaded, SharedDecisions, TransformPipeline
from gateway.response_store import ResponseStore, StoringTranslator
from gateway.storage.base import BlobCache
from gateway.types import Call, Operation, Principal, PromptMedia, Trace

_TIMEOUT_AND_SESSION_HEADERS = frozenset((*SESSION_HEADERS, *TIMEOUT_HEADERS))
MAX_LOADS = 10  # rounds of loading decisions: a plan, a conversation's plan, two transforms of three fields, and chunks
MESSAGE_TOKENS = 4  # that a chat template adds, roughly

_CHAT, _COMPLETION = Operation.CHAT, Operation.COMPLETION  # a class of enums is read slowly

_metadata = msgspec.json.Decoder(Metadata | None)
_list = msgspec.json.Decoder(list[msgspec.Raw] | None)


def new_call_id() -> str:
    """A random id for a call, `req_` and 24 hex digits."""
    return f"req_{random_bytes(12).hex()}"


class _Untranslated:
    """Reads a body that its endpoint refuses, for deployments that have the client's API."""

    def __init__(self, reader: NativeReader, refusal: BadRequest) -> None:
        self.operation = Operation.CHAT
        self._reader = reader
        self._refusal = refusal

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        return self._reader.read_native(fields, body, self._refusal)


class Canonicaliser:
    """Turns bodies into calls. Owned by the event loop."""

    def __init__(
        self,
        secret: bytes,
        blobs: BlobCache | None = None,
        response_store: ResponseStore | None = None,
        media_calibration: MediaCalibration | None = None,
    ) -> None:
        """`secret` is the key of the tenants' salts, so that they cannot be computed without it.

        `blobs` is where replicas share their decisions; without it, this process decides alone. `response_store` has
        the stored responses that bodies refer to; without it, none are stored. `media_calibration` corrects how media
        are counted, and may be shared with another canonicaliser.
        """
        self.response_store = response_store
        self.media_calibration = MediaCalibration() if media_calibration is None else media_calibration
        self._contexts = CallerContexts(secret)
        self._pipeline = TransformPipeline(SharedDecisions(blobs))
        self._fingerprints = FingerprintCache()

    async def close(self) -> None:
        """Stop sharing decisions. Safe to call twice."""
        await self._pipeline.decisions.close()

    async def load_and_canonicalise(
        self,
        endpoint: BodyReader,
        body: bytes,
        headers: Headers,
        *,
        call_id: str,
        principal: Principal,
        policy: Policy,
        now: float,
        trace: Trace,
    ) -> Call:
        """Does what `canonicalise` does, after it has loaded from the storage what that needs.

        That is the stored response that the body continues, and decisions that this process does not know.
        """
        large = is_large(body)
        if isinstance(endpoint, StoringTranslator):
            endpoint.large = large
            endpoint.use_policy(policy)
            if policy.stores_responses and self.response_store is not None:
                responses = self.response_store.of(principal.tenant, policy)
                if responses is not None:
                    await endpoint.load_history(body, responses)
                    large = endpoint.large
        if large:
            parsed = await in_thread(_parse, endpoint, body, policy, check_and_parse)
        else:
            parsed = _parse(endpoint, body, policy, parse)
        decisions = self._pipeline.decisions
        for _ in range(MAX_LOADS):
            try:
                return self.canonicalise(
                    endpoint, body, headers, call_id=call_id, principal=principal, policy=policy, now=now,
                    trace=trace, parsed=parsed, large=large,
                )  # fmt: skip
            except DecisionNotLoaded as missing:
                await decisions.load(missing.keys)
        with decisions.without_storage():  # there is so much traffic that loaded decisions were evicted again
            return self.canonicalise(
                endpoint, body, headers, call_id=call_id, principal=principal, policy=policy, now=now,
                trace=trace, parsed=parsed, large=large,
            )  # fmt: skip

    def canonicalise(
        self,
        endpoint: BodyReader,
        body: bytes,
        headers: Headers,
        *,
        call_id: str,
        principal: Principal,
        policy: Policy,
        now: float,
        trace: Trace,
        parsed: ParsedBody | None = None,
        large: bool = False,
    ) -> Call:
        """Turn a body into a call. `now` is in event-loop seconds. `parsed` is the body, if it was parsed before.

        `large` says that further work on the whole body must run in the worker thread.

        Raises `BadRequest`, `ModelNotFound` or `Forbidden`; and `DecisionNotLoaded` if the storage has to be read
        first.
        """
        parsed = parsed or parse(endpoint, body)
        stored = False
        if "store" in parsed.fields and parsed.messages and parsed.native is None:
            parsed, stored = self._stored_here(parsed, principal.tenant, policy)
        operation, common = endpoint.operation, parsed.common
        context = self._contexts.find(policy, principal, common.model)
        if self._contexts.has_routes:
            context = self._contexts.routed(context, policy, operation, parsed, headers)
        parsed, fields, steps, native = self._canonical_form(parsed, context, policy, operation, headers)
        counted = count_pieces(parsed.pieces, context.media_formulas)
        tokens = counted.tokens + MESSAGE_TOKENS if parsed.prompt_tokens is None else parsed.prompt_tokens
        media = None if counted.media is None else self._corrected(counted.media, context)
        rule, class_name, latency_class = self._contexts.choose_class(
            principal, operation, parsed, tokens if media is None else tokens + media.correction, headers
        )
        has_prefix = operation is _CHAT or operation is _COMPLETION  # as in the call
        stream = bool(common.stream) and has_prefix if parsed.passed is None else parsed.passed.stream
        session, read_timeout, total = None, math.inf, latency_class.total
        if common.prompt_cache_key or not _TIMEOUT_AND_SESSION_HEADERS.isdisjoint(headers):
            session = session_of(common, headers, context.salt)
            read_timeout, total = _timeouts(headers, total, stream)
        options = common.stream_options
        return Call(  # positional, since keyword arguments would take longer than the rest of the call's creation
            call_id,
            operation,
            principal,
            policy,
            common.model,  # asked_model
            context.model,
            class_name,
            latency_class,
            stream,
            bool(options and options.include_usage),
            _output_bound(parsed),
            parsed.deterministic,
            fields,
            self._fingerprints.fingerprint(counted.texts, context.seed) if has_prefix else (),
            tokens,
            context.salt,
            common.service_tier,
            common.safety_identifier or common.user,  # end_user
            steps,
            rule,
            now + total,  # deadline
            trace,
            read_timeout,
            bool(options and options.continuous_usage_stats),
            session,
            hints=parsed.hints,
            media=media,
            passed=parsed.passed,
            wildcard=context.wildcard,
            route=context.route,
            routed_model=context.routed_model,
            large=large,
            native=native,
            stored=stored,
            preferred=_weighted(context, parsed, headers) if context.has_weights else None,
        )

    def _stored_here(self, parsed: ParsedBody, tenant: Tenant, policy: Policy) -> tuple[ParsedBody, bool]:
        """A chat with `store`, and whether the gateway stores it. The deployment then does not get the field."""
        if self.response_store is None or bytes(parsed.fields["store"]) != b"true":
            return parsed, False
        if self.response_store.of(tenant, policy) is None:
            return parsed, False
        if "metadata" in parsed.fields:
            decode(_metadata, bytes(parsed.fields["metadata"]))
        fields = {name: value for name, value in parsed.fields.items() if name != "store"}
        return msgspec.structs.replace(parsed, fields=fields), True

    def _canonical_form(
        self, parsed: ParsedBody, context: CallerContext, policy: Policy, operation: Operation, headers: Headers
    ) -> tuple[ParsedBody, Fields, tuple[str, ...], NativeRequest | None]:
        """The body as deployments get it: parsed, its fields, the transforms applied, and in the client's API.

        The parsed body keeps its own fields if the transforms changed none of the texts that its pieces have.
        """
        model = context.model
        native = None if parsed.native is None else _native(parsed.native, model, policy, headers)
        if parsed.with_breakpoints is not None and model.name in policy.breakpoint_models:
            parsed = parsed.with_breakpoints()
        steps: tuple[str, ...] = ()
        fields = parsed.fields
        if parsed.messages:
            plan = self._pipeline.plans.plan_for(context.plan, context.tenant_name, context.model_name, parsed.messages)
            canonical = self._pipeline.canonical_body(fields, parsed.messages, plan, context.salt, plain=parsed.plain)
            if canonical is not None:
                steps = canonical.steps
                if not canonical.keeps_texts(fields):
                    parsed = with_canonical_body(parsed, canonical)
                fields = canonical.fields
        if (cap := context.output_cap) is not None and parsed.max_output_tokens is None:
            parsed = _with_capped_output(parsed, fields, operation, cap)
            fields = parsed.fields
            if native is not None:
                native = native.with_output_limit(cap.default_output_tokens)
        return parsed, fields, steps, native

    def _corrected(self, media: PromptMedia, context: CallerContext) -> PromptMedia:
        """A prompt's media with what replies have taught about the model's count of them."""
        corrected = self.media_calibration.corrected_tokens(context.tenant_name, context.model_name, media)
        return msgspec.structs.replace(media, correction=corrected - media.formula_tokens)


def with_canonical_body(parsed: ParsedBody, canonical: CanonicalBody) -> ParsedBody:
    """The parsed body with its canonical form. Only what the transforms changed is parsed again."""
    if canonical.changed_messages is None:
        assert parsed.reread is not None  # there are messages
        return msgspec.structs.replace(
            parsed.reread(canonical.fields, join_fields(canonical.fields)), hints=parsed.hints, native=parsed.native
        )
    tools: Sequence[Piece] = parsed.pieces[: parsed.tools]
    if canonical.fields.get("tools") is not parsed.fields.get("tools"):
        tools = [without_breakpoint(bytes(tool)) for tool in _list.decode(canonical.fields["tools"]) or ()]
    elif not canonical.changed_messages:
        return msgspec.structs.replace(parsed, fields=canonical.fields)
    pieces = [*tools, *parsed.pieces[parsed.tools :]]
    for number, message in canonical.changed_messages.items():
        pieces[len(tools) + number] = parsed.piece_of(message)
    return msgspec.structs.replace(parsed, fields=canonical.fields, pieces=tuple(pieces))


def join_fields(fields: Fields) -> bytes:
    """One JSON object of the fields. Each value keeps its bytes."""
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(value) for name, value in fields.items()) + b"}"


def _parse(
    endpoint: BodyReader, body: bytes, policy: Policy, parser: Callable[[BodyReader, bytes], ParsedBody]
) -> ParsedBody:
    """Parse a body. If only a deployment that has the client's API can serve it, it is parsed as far as needed."""
    try:
        return parser(endpoint, body)
    except BadRequest as refusal:
        if not isinstance(endpoint, NativeReader) or not policy.native_models[endpoint.api]:
            raise
        return parser(_Untranslated(endpoint, refusal), body)


def _native(request: NativeRequest, model: Model, policy: Policy, headers: Headers) -> NativeRequest | None:
    """The request for deployments that have the client's API. None if the model has none. Raises its refusal then."""
    if model.name in policy.native_models[request.api]:
        return request.with_headers(dict(headers))
    if request.refusal is not None:
        raise request.refusal
    return None


def _timeouts(headers: Headers, total: float, stream: bool) -> tuple[float, float]:
    """The client's timeout for the next bytes, and `total` shortened by the client's timeouts. All in seconds."""
    read_timeout = read_timeout_seconds(headers)
    total = min(total, total_timeout_seconds(headers))
    return read_timeout, total if stream else min(total, read_timeout)


def _weighted(context: CallerContext, parsed: ParsedBody, headers: Headers) -> str:
    """The deployment that gets the call's conversation, by the model's weights."""
    conversation = conversation_of(parsed.common, headers, context.salt)
    return choose_deployment(context.model.weight_ends, parsed, conversation)


def _with_capped_output(parsed: ParsedBody, fields: Fields, operation: Operation, limits: TenantLimits) -> ParsedBody:
    """The body with these fields and the policy's bound on output. The bound is for each choice, as a client's."""
    name = "max_tokens" if operation is Operation.COMPLETION else limits.cap_output
    bound = limits.default_output_tokens
    fields = {**fields, str(name): msgspec.Raw(str(bound).encode())}
    return msgspec.structs.replace(parsed, fields=fields, max_output_tokens=bound)


def _output_bound(parsed: ParsedBody) -> int | None:
    """The upper bound on output tokens over all choices, if the client set one."""
    if parsed.max_output_tokens is None:
        return None
    tokens = parsed.max_output_tokens * parsed.choices
    return tokens if tokens < MAX_TOKENS else MAX_TOKENS
