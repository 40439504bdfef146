"""Phase 2: canonicalises and fingerprints a parsed prompt, chooses its latency class, and builds the `Call`.

The endpoint's body reader parses and checks the fields that the gateway acts on; other fields stay as they came.
`TransformPipeline` brings the prompt into its canonical form, as far as the policy allows. Then the prompt is
fingerprinted, and the policy's first matching rule selects the latency class.

What the calls of one key for one model have in common (model, salt, transform plan) is computed once per policy, in a
`_CallerContext`. `canonicalise` never waits. `load_and_canonicalise` first reads from the storage what it needs.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Sequence

import msgspec

from gateway.core.cache_breakpoints import without_breakpoint
from gateway.core.deadlines import TIMEOUT_HEADERS, read_timeout_seconds, total_timeout_seconds
from gateway.core.errors import BadRequest, Forbidden, ModelNotFound
from gateway.core.ids import random_bytes
from gateway.core.native_requests import NativeRequest
from gateway.core.worker_thread import in_thread
from gateway.policy import LatencyClass, Model, Policy, Tenant, TenantLimits
from gateway.policy.media_formulas import MediaFormula
from gateway.policy.wildcards import STAR
from gateway.prefix.fingerprint import FingerprintCache, seed_of
from gateway.prompts.large_bodies import check_and_parse, is_large, parse
from gateway.prompts.matching import Conditions, Headers, MatchedCall
from gateway.prompts.media.calibration import MediaCalibration
from gateway.prompts.media.counting import Piece, count_pieces
from gateway.prompts.model_choice import choose_deployment, choose_route
from gateway.prompts.reader import MAX_TOKENS, BodyReader, Fields, Metadata, NativeReader, ParsedBody, decode
from gateway.prompts.transforms import (
    VERSION,
    CanonicalBody,
    DecisionNotLoaded,
    SharedDecisions,
    TransformPipeline,
    TransformPlan,
)
from gateway.response_store import ResponseStore, StoringTranslator
from gateway.storage.base import BlobCache
from gateway.types import Call, Operation, Principal, PromptMedia, Trace

SALT_BYTES = 16
SESSION_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-affinity")
_TIMEOUT_AND_SESSION_HEADERS = frozenset((*SESSION_HEADERS, *TIMEOUT_HEADERS))
MAX_CONTEXTS = 50_000  # pairs of a key and a model name
MAX_LOADS = 10  # rounds of loading decisions: a plan, a conversation's plan, two transforms of three fields, and chunks
MAX_NAME_CHARACTERS = 200  # of a client's name in an error message; no policy has longer ones
ROUTED = "\0"  # begins the name of a model that a route chose, which the caller need not be allowed to use
MESSAGE_TOKENS = 4  # that a chat template adds, roughly

_CHAT, _COMPLETION = Operation.CHAT, Operation.COMPLETION  # a class of enums is read slowly

_metadata = msgspec.json.Decoder(Metadata | None)
_list = msgspec.json.Decoder(list[msgspec.Raw] | None)


def new_call_id() -> str:
    """A random id for a call, `req_` and 24 hex digits."""
    return f"req_{random_bytes(12).hex()}"


class _CallerContext(msgspec.Struct, frozen=True):
    """What all calls of one key for one model name have in common under one policy."""

    principal: Principal
    model: Model
    tenant_name: str
    model_name: str
    output_cap: TenantLimits | None  # of the tenant, if they bound the output of calls that do not
    plan: TransformPlan  # that the policy wants for new conversations
    salt: str
    seed: int
    media_formulas: tuple[MediaFormula, ...]  # of the model's deployments
    wildcard: str  # what the `*` in the model's name stands for
    has_weights: bool = False  # the model's weights choose the deployment of a conversation
    route: str | None = None
    routed_model: str | None = None


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
        self._secret = secret
        self.response_store = response_store
        self._salts: dict[tuple[str, str | None], str] = {}  # by tenant and cache group
        self._pipeline = TransformPipeline(SharedDecisions(blobs))
        self._fingerprints = FingerprintCache()
        self.media_calibration = MediaCalibration() if media_calibration is None else media_calibration
        self._policy: Policy | None = None  # of the last call
        self._plans: dict[tuple[str, str], TransformPlan] = {}  # under that policy, by tenant and model
        self._contexts: dict[tuple[str, str], _CallerContext] = {}  # likewise, by key and model name
        self._rules: list[tuple[Conditions, str]] = []  # likewise, each with its latency class
        self._routes: list[Conditions] = []  # likewise
        self._classes: dict[str, LatencyClass] = {}  # likewise
        self._default_class = ""

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
        """As `canonicalise`, after loading what it needs from the storage.

        It loads the stored response that the body continues, and decisions that this process does not know.
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
        common = parsed.common
        context = self._contexts.get((principal.key_id, common.model))
        if context is None or policy is not self._policy or principal is not context.principal:
            context = self._make_context(policy, principal, common.model)
        if self._routes:
            context = self._routed(context, policy, endpoint.operation, parsed, headers)
        model, salt = context.model, context.salt
        native = None if parsed.native is None else _native(parsed.native, model, policy, headers)
        if parsed.with_breakpoints is not None and model.name in policy.breakpoint_models:
            parsed = parsed.with_breakpoints()
        steps: tuple[str, ...] = ()
        fields = parsed.fields
        if parsed.messages:
            plan = self._pipeline.plans.plan_for(context.plan, context.tenant_name, context.model_name, parsed.messages)
            canonical = self._pipeline.canonical_body(fields, parsed.messages, plan, salt, plain=parsed.plain)
            if canonical is not None:
                steps = canonical.steps
                if not canonical.keeps_texts(fields):
                    parsed = with_canonical_body(parsed, canonical)
                fields = canonical.fields
        if (cap := context.output_cap) is not None and parsed.max_output_tokens is None:
            parsed = _with_capped_output(parsed, fields, endpoint.operation, cap)
            fields = parsed.fields
            if native is not None:
                native = native.with_output_limit(cap.default_output_tokens)
        counted = count_pieces(parsed.pieces, context.media_formulas)
        tokens = counted.tokens + MESSAGE_TOKENS if parsed.prompt_tokens is None else parsed.prompt_tokens
        input_tokens, media = tokens, counted.media
        if media is not None:
            media = self._corrected(media, context)
            input_tokens += media.correction
        operation = endpoint.operation
        rule, class_name = self._choose_class(principal, operation, parsed, input_tokens, headers)
        if principal.classes is not None and class_name not in principal.classes:
            raise Forbidden(f"the key {principal.key_id!r} may not use the class {class_name!r}")
        latency_class = self._classes[class_name]
        has_prefix = operation is _CHAT or operation is _COMPLETION  # as in the call
        stream = bool(common.stream) and has_prefix if parsed.passed is None else parsed.passed.stream
        read_timeout = total_timeout = math.inf
        session = None
        if common.prompt_cache_key or not _TIMEOUT_AND_SESSION_HEADERS.isdisjoint(headers):
            read_timeout, total_timeout = read_timeout_seconds(headers), total_timeout_seconds(headers)
            session = _session(common.prompt_cache_key, headers, salt)
        total = latency_class.total
        if total_timeout < total:
            total = total_timeout
        if read_timeout < total and not stream:
            total = read_timeout
        options = common.stream_options
        return Call(  # positional, since keyword arguments would take longer than the rest of the call's creation
            call_id,
            operation,
            principal,
            policy,
            common.model,  # asked_model
            model,
            class_name,
            latency_class,
            stream,
            bool(options and options.include_usage),
            _output_bound(parsed),
            parsed.deterministic,
            fields,
            self._fingerprints.fingerprint(counted.texts, context.seed) if has_prefix else (),
            tokens,
            salt,
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
            preferred=_weighted(model, parsed, headers, salt) if context.has_weights else None,
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

    def _routed(
        self, context: _CallerContext, policy: Policy, operation: Operation, parsed: ParsedBody, headers: Headers
    ) -> _CallerContext:
        """The context for the model and deployments to which the policy's routes send the call, or the given one."""
        principal, common = context.principal, parsed.common
        call = MatchedCall(principal, operation, parsed, 0, headers)
        conversation = _session(common.prompt_cache_key, headers, context.salt) or common.safety_identifier
        chosen = choose_route(
            policy.model_routes,
            lambda index: self._routes[index].hold(call),
            parsed,
            conversation or common.user or "",
        )
        if chosen is None:
            return context
        index, target = chosen
        asked = target or common.model
        if STAR in asked:
            asked = asked.replace(STAR, context.wildcard)
        name = f"{ROUTED}{index}:{asked}"
        known = self._contexts.get((principal.key_id, name))
        if known is not None and known.principal is principal:
            return known
        model = policy.find_model(asked)
        if model is None or not policy.model_routes[index].deployments:
            narrowed = model
        else:
            narrowed = policy.routed_models.get((index, model.name))
        if narrowed is None:
            return context  # the model has none of the route's deployments
        route = policy.model_routes[index].name
        moved = None if model is context.model and asked == common.model else asked
        routed = self._context_of(policy, principal, narrowed, policy.wildcard_part(asked))
        routed = msgspec.structs.replace(routed, route=route, routed_model=moved)
        self._contexts[principal.key_id, name] = routed
        return routed

    def _corrected(self, media: PromptMedia, context: _CallerContext) -> PromptMedia:
        """A prompt's media with what replies have taught about the model's count of them."""
        corrected = self.media_calibration.corrected_tokens(context.tenant_name, context.model_name, media)
        return msgspec.structs.replace(media, correction=corrected - media.formula_tokens)

    def _make_context(self, policy: Policy, principal: Principal, parsed: str) -> _CallerContext:
        """The context of a key's calls for a model name.

        Raises `ModelNotFound` or `Forbidden`. Nothing is remembered about callers who may not use the model.
        """
        if policy is not self._policy or len(self._contexts) >= MAX_CONTEXTS:
            self._policy, self._plans, self._contexts = policy, {}, {}
            self._rules = [(Conditions(rule.match), rule.latency_class) for rule in policy.rules]
            self._routes = [Conditions(route.match) for route in policy.model_routes]
            self._classes, self._default_class = policy.classes, policy.default_class
        model, wildcard = _model(policy, principal, parsed), policy.wildcard_part(parsed)
        context = self._context_of(policy, principal, model, wildcard)
        self._contexts[principal.key_id, parsed] = context
        return context

    def _context_of(self, policy: Policy, principal: Principal, model: Model, wildcard: str) -> _CallerContext:
        tenant = principal.tenant
        plan, salt = self._plan(policy, tenant.name, model.name), self._salt(tenant)
        # One deployment with a `*` serves several models, and each has a prefix cache of its own.
        seed = seed_of(f"{salt}\n{wildcard}" if wildcard else salt)
        formulas, cap = policy.media_formulas[model.name], tenant.limits.cap_output
        cap_limits = None if cap is None else tenant.limits
        return _CallerContext(
            principal,
            model,
            tenant.name,
            model.name,
            cap_limits,
            plan,
            salt,
            seed,
            formulas,
            wildcard,
            has_weights=model.weights is not None,
        )

    def _choose_class(
        self, principal: Principal, operation: Operation, parsed: ParsedBody, prompt_tokens: int, headers: Headers
    ) -> tuple[int | None, str]:
        """The first matching rule's index and class. `(None, default class)` if no rule matches."""
        if self._rules:
            call = MatchedCall(principal, operation, parsed, prompt_tokens, headers)
            for index, (conditions, class_name) in enumerate(self._rules):
                if conditions.hold(call):
                    return index, class_name
        return None, self._default_class

    def _plan(self, policy: Policy, tenant: str, model: str) -> TransformPlan:
        """What the policy wants. Returns the same object as long as the policy is the same."""
        plan = self._plans.get((tenant, model))
        if plan is None:
            form = policy.canonicalise.form_for(tenant, model)
            plan = self._plans[tenant, model] = TransformPlan(VERSION, form.level, form.opt_in, form.template_date)
        return plan

    def _salt(self, tenant: Tenant) -> str:
        """The tenant's salt, or its cache group's.

        A group's salt differs from every tenant's, even if the names are equal.
        """
        owner = (tenant.name, tenant.cache_group)
        if owner not in self._salts:
            group = tenant.cache_group
            name = f"cache-salt:{tenant.name}" if group is None else f"cache-group:{group}"
            digest = hmac.new(self._secret, name.encode(), hashlib.sha256).digest()
            self._salts[owner] = digest[:SALT_BYTES].hex()
        return self._salts[owner]


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


def _model(policy: Policy, principal: Principal, parsed: str) -> Model:
    """The model that a name or alias stands for, if the caller may use it.

    To a caller, a model that its tenant may not use does not exist. A key that may use fewer models than its tenant
    gets `Forbidden`.
    """
    model = policy.find_model(parsed) if len(parsed) <= MAX_NAME_CHARACTERS else None
    if model is None or not principal.tenant_may_use(model, parsed) or not parsed.isprintable() or STAR in parsed:
        name = parsed[:MAX_NAME_CHARACTERS]
        raise ModelNotFound(f"the model {name!r} does not exist or is not yours to use", param="model")
    if not principal.may_use(model, parsed):
        raise Forbidden(f"the key {principal.key_id!r} may not use the model {parsed!r}", param="model")
    return model


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


def _weighted(model: Model, parsed: ParsedBody, headers: Headers, salt: str) -> str:
    """The deployment that gets the call's conversation, by the model's weights."""
    common = parsed.common
    conversation = _session(common.prompt_cache_key, headers, salt) or common.safety_identifier or common.user or ""
    return choose_deployment(model.weight_ends, parsed, conversation)


def _session(prompt_cache_key: str | None, headers: Headers, salt: str) -> str | None:
    """The client's session name, prefixed with the salt so that equal names of different tenants differ."""
    if prompt_cache_key:
        return f"{salt}:{prompt_cache_key[:MAX_NAME_CHARACTERS]}"
    for header in SESSION_HEADERS:
        if header in headers:
            return f"{salt}:{headers[header][:MAX_NAME_CHARACTERS].decode('latin-1')}"
    return None


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
