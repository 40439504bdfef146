"""Phase 2: a request's body becomes a `Call`.

What we act on is read and checked, the rest is kept as it came; the prompt is brought into its canonical form as far
as the policy allows, and fingerprinted.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.core.cache_breakpoints import without_breakpoint
from gateway.core.deadlines import TIMEOUT_HEADERS, read_timeout_seconds, total_timeout_seconds
from gateway.core.errors import Forbidden, ModelNotFound
from gateway.core.ids import random_bytes
from gateway.policy import Match, Model, Policy, Tenant
from gateway.prefix.fingerprint import BYTES_PER_TOKEN, FingerprintCache, seed_of
from gateway.prompts.reader import MAX_TOKENS, BodyReader, Fields, ParsedBody, read_fields
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
from gateway.types import Call, Operation, Principal, Trace

Headers = Mapping[bytes, bytes]
SALT_BYTES = 16
SESSION_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-affinity")
_ASKED_BY_HEADERS = frozenset((*SESSION_HEADERS, *TIMEOUT_HEADERS))
MAX_KNOWN = 10_000  # callers, each with a name of a model
MAX_RECALLS = 6  # a plan, a conversation, and what three fields hold
MAX_NAME_CHARACTERS = 200  # of a name that is told back; no policy has longer ones
MESSAGE_TOKENS = 4  # what a chat template adds around each message, roughly

_list = msgspec.json.Decoder(list[msgspec.Raw] | None)


def new_call_id() -> str:
    return f"req_{random_bytes(12).hex()}"


class _Known(msgspec.Struct, frozen=True):
    """What calls of one caller for one name of a model have in common, for as long as the policy is the same."""

    principal: Principal
    model: Model
    tenant_name: str
    model_name: str
    plan: TransformPlan  # that the policy wants
    salt: str
    seed: int


class Canonicaliser:
    """`secret` keys the tenants' salts, so that nobody can compute another tenant's."""

    def __init__(
        self, secret: bytes, blobs: BlobCache | None = None, response_store: ResponseStore | None = None
    ) -> None:
        """`blobs` is where replicas agree on forms; without it, this process decides alone. `response_store` has the
        stored responses that bodies refer to; without it, nothing is stored.
        """
        self._secret = secret
        self._response_store = response_store
        self._salts: dict[tuple[str, str | None], str] = {}  # by tenant and group: bounded by the policies' tenants
        self._canon = TransformPipeline(SharedDecisions(blobs))
        self._fingerprints = FingerprintCache()
        self._policy: Policy | None = None  # that was seen last
        self._plans: dict[tuple[str, str], TransformPlan] = {}  # of that policy, by tenant and model
        self._known: dict[tuple[str, str], _Known] = {}  # likewise, by key and the model's name: bounded

    async def close(self) -> None:
        await self._canon.memory.close()

    async def canonicalised(self, endpoint: BodyReader, body: bytes, headers: Headers, **context: Any) -> Call:
        """`canonicalise`, after asking the storage for what this process does not know: what the body goes on from, and
        once for each schema."""
        if (
            context["policy"].stores_responses
            and self._response_store is not None
            and isinstance(endpoint, StoringTranslator)
        ):
            responses = self._response_store.of(context["principal"].tenant, context["policy"])
            if responses is not None:
                await endpoint.recall(body, responses)
        memory = self._canon.memory
        for _ in range(MAX_RECALLS):
            try:
                return self.canonicalise(endpoint, body, headers, **context)
            except DecisionNotLoaded as unknown:
                await memory.recall(unknown.keys)
        with memory.alone():  # so much is going on that what was fetched is crowded out again
            return self.canonicalise(endpoint, body, headers, **context)

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
    ) -> Call:
        """Raises `BadRequest`, `ModelNotFound` or `Forbidden`, and `NotInMemory` where there is a storage to be asked.
        `now` is the event loop's time.
        """
        asked = endpoint.read(read_fields(body), body)
        common = asked.common
        known = self._known.get((principal.key_id, common.model))
        if known is None or policy is not self._policy or principal is not known.principal:
            known = self._get_to_know(policy, principal, common.model)
        model, salt = known.model, known.salt
        if asked.with_breakpoints is not None and model.name in policy.breakpoint_models:
            asked = asked.with_breakpoints()
        steps: tuple[str, ...] = ()
        if asked.messages:
            plan = self._canon.plans.plan_for(known.plan, known.tenant_name, known.model_name, asked.messages)
            form = self._canon.form(asked.fields, asked.messages, plan, salt, plain=asked.plain)
            if form is not None:
                asked, steps = in_form(asked, form), form.steps
        tokens = _prompt_tokens(asked)
        rule, class_name = choose_class(policy, principal, endpoint.operation, asked, tokens, headers)
        if principal.classes is not None and class_name not in principal.classes:
            raise Forbidden(f"the key {principal.key_id!r} may not use the class {class_name!r}")
        latency_class = policy.classes[class_name]
        stream = bool(common.stream) and endpoint.operation is not Operation.EMBEDDING
        patience = whole = math.inf
        session = None
        if common.prompt_cache_key or not _ASKED_BY_HEADERS.isdisjoint(headers):
            patience, whole = read_timeout_seconds(headers), total_timeout_seconds(headers)
            session = _session(common.prompt_cache_key, headers, salt)
        total = latency_class.total
        if whole < total:
            total = whole
        if patience < total and not stream:
            total = patience
        return Call(
            id=call_id,
            operation=endpoint.operation,
            principal=principal,
            policy=policy,
            asked_model=common.model,
            model=model,
            class_name=class_name,
            latency_class=latency_class,
            stream=stream,
            include_usage=bool(common.stream_options and common.stream_options.include_usage),
            continuous_usage=bool(common.stream_options and common.stream_options.continuous_usage_stats),
            max_output_tokens=_output_bound(asked),
            deterministic=asked.deterministic,
            fields=asked.fields,
            fingerprint=()
            if endpoint.operation is Operation.EMBEDDING
            else self._fingerprints.fingerprint(asked.pieces, known.seed),
            prompt_tokens_estimate=tokens,
            cache_salt=salt,
            service_tier=common.service_tier,
            end_user=common.safety_identifier or common.user,
            canonical_steps=steps,
            class_rule=rule,
            deadline=now + total,
            read_timeout_seconds=patience,
            trace=trace,
            session=session,
            hints=asked.hints,
        )

    def _get_to_know(self, policy: Policy, principal: Principal, asked: str) -> _Known:
        """Raises `ModelNotFound` or `Forbidden`: of who may not use a model nothing is kept."""
        if policy is not self._policy or len(self._known) >= MAX_KNOWN:
            self._policy, self._plans, self._known = policy, {}, {}
        model, tenant = _model(policy, principal, asked), principal.tenant
        plan, salt = self._plan(policy, tenant.name, model.name), self._salt(tenant)
        known = _Known(principal, model, tenant.name, model.name, plan, salt, seed_of(salt))
        self._known[principal.key_id, asked] = known
        return known

    def _plan(self, policy: Policy, tenant: str, model: str) -> TransformPlan:
        """What the policy wants; the same object for as long as the policy is."""
        plan = self._plans.get((tenant, model))
        if plan is None:
            form = policy.canonicalise.form_for(tenant, model)
            plan = self._plans[tenant, model] = TransformPlan(VERSION, form.level, form.opt_in, form.template_date)
        return plan

    def _salt(self, tenant: Tenant) -> str:
        """Equal within a cache group, and else for nobody. A group has no tenant's salt, also where names agree."""
        owner = (tenant.name, tenant.cache_group)
        if owner not in self._salts:
            group = tenant.cache_group
            name = f"cache-salt:{tenant.name}" if group is None else f"cache-group:{group}"
            digest = hmac.new(self._secret, name.encode(), hashlib.sha256).digest()
            self._salts[owner] = digest[:SALT_BYTES].hex()
        return self._salts[owner]


def in_form(asked: ParsedBody, form: CanonicalBody) -> ParsedBody:
    """What a body says in its canonical form, of which only what is now otherwise has to be read."""
    if form.reworded is None:
        assert asked.reread is not None  # there are messages
        return msgspec.structs.replace(asked.reread(form.fields, join(form.fields)), hints=asked.hints)
    if not form.reworded and "tools" not in form.fields:
        return msgspec.structs.replace(asked, fields=form.fields)
    tools = [without_breakpoint(bytes(tool)) for tool in _list.decode(form.fields.get("tools", b"null")) or ()]
    pieces = [*tools, *asked.pieces[asked.tools :]]
    for number, message in form.reworded.items():
        pieces[len(tools) + number] = asked.piece_of(message)
    return msgspec.structs.replace(asked, fields=form.fields, pieces=tuple(pieces))


def join(fields: Fields) -> bytes:
    """One JSON object of the fields, each value byte for byte."""
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(value) for name, value in fields.items()) + b"}"


def choose_class(
    policy: Policy, principal: Principal, operation: Operation, asked: ParsedBody, prompt_tokens: int, headers: Headers
) -> tuple[int | None, str]:
    """The first rule that matches and the class that it gives; (None, the default class) where none does."""
    for index, rule in enumerate(policy.rules):
        if matches(rule.match, principal, operation, asked, prompt_tokens, headers):
            return index, rule.latency_class
    return None, policy.default_class


def matches(
    match: Match, principal: Principal, operation: Operation, asked: ParsedBody, prompt_tokens: int, headers: Headers
) -> bool:
    """Whether all conditions of a rule hold."""
    common = asked.common
    return (
        (match.model is None or common.model in match.model)
        and (match.endpoint is None or operation in match.endpoint)
        and (match.tenant is None or principal.tenant.name in match.tenant)
        and (match.key is None or principal.key_id in match.key)
        and (match.service_tier is None or common.service_tier in match.service_tier)
        and (match.min_prompt_tokens is None or prompt_tokens >= match.min_prompt_tokens)
        and (not match.header or _has_headers(match.header, headers))
        and (not match.metadata or _has_metadata(match.metadata, common.metadata or {}))
    )


def _has_headers(wanted: Mapping[str, str], headers: Headers) -> bool:
    return all(headers.get(name.encode()) == value.encode() for name, value in wanted.items())


def _has_metadata(wanted: Mapping[str, str], metadata: Mapping[str, Any]) -> bool:
    return all(str(metadata.get(name)) == value for name, value in wanted.items())


def _model(policy: Policy, principal: Principal, asked: str) -> Model:
    """The model that a name or alias stands for, if the caller may use it.

    What a caller may not use does not exist for it, but a key that is narrower than its tenant is told so.
    """
    model = policy.models_by_name.get(asked)
    if model is None or not principal.tenant_may_use(model):
        name = asked[:MAX_NAME_CHARACTERS]
        raise ModelNotFound(f"the model {name!r} does not exist or is not yours to use", param="model")
    if not principal.may_use(model):
        raise Forbidden(f"the key {principal.key_id!r} may not use the model {asked!r}", param="model")
    return model


def _session(prompt_cache_key: str | None, headers: Headers, salt: str) -> str | None:
    """The name that a client gives to its conversation, apart from the same name given by another tenant."""
    if prompt_cache_key:
        return f"{salt}:{prompt_cache_key[:MAX_NAME_CHARACTERS]}"
    for header in SESSION_HEADERS:
        if header in headers:
            return f"{salt}:{headers[header][:MAX_NAME_CHARACTERS].decode('latin-1')}"
    return None


def _output_bound(asked: ParsedBody) -> int | None:
    if asked.max_output_tokens is None:
        return None
    return min(asked.max_output_tokens * asked.choices, MAX_TOKENS)


def _prompt_tokens(asked: ParsedBody) -> int:
    """How many tokens the prompt has, about: known for token ids, else a quarter of its bytes."""
    if asked.prompt_tokens is not None:
        return asked.prompt_tokens
    return sum(map(len, asked.pieces)) // BYTES_PER_TOKEN + MESSAGE_TOKENS
