"""What flows through the gateway: `Principal -> Call -> Reservation -> Upstream -> Usage -> Receipt`.

Everything here is frozen, except `PhaseTimings`: a phase returns a new value and changes nothing that it was given.

Minimal path 2 of 7. Next: endpoints/chat.py.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Collection
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import force_setattr

from gateway.core.native_requests import NativeRequest
from gateway.core.passed_requests import PassedRequest
from gateway.policy import REALTIME, LatencyClass, Limits, Model, Policy, Tenant
from gateway.policy.wildcards import names_include


class Principal(msgspec.Struct, frozen=True):
    """Who calls: a key of a tenant. `models` and `classes` are None if the key may use all of them."""

    tenant: Tenant
    key_id: str
    models: frozenset[str] | None = None
    classes: frozenset[str] | None = None
    limits: Limits | None = None  # the key's own, within its tenant's
    tenant_name: str = ""  # its tenant's; set here, since the policy's models are slow to read

    def __post_init__(self) -> None:
        force_setattr(self, "tenant_name", self.tenant.name)

    def tenant_may_use(self, model: Model, asked: str) -> bool:
        """Whether the tenant and all its ancestors may use a model by the name asked for, its own or an alias."""
        return all(_names_one_of(allowed, model, asked) for allowed in self.tenant.model_lists)

    def may_use(self, model: Model, asked: str) -> bool:
        """Whether both the tenant and this key may use a model."""
        return self.tenant_may_use(model, asked) and _names_one_of(self.models, model, asked)


def _names_one_of(allowed: Collection[str] | None, model: Model, asked: str) -> bool:
    return allowed is None or any(names_include(allowed, name) for name in (asked, model.name, *model.aliases))


class Operation(enum.StrEnum):
    """The operation that a request asks for, as the path after `/v1/`. `telemetry.names` maps it to GenAI's names."""

    CHAT = "chat/completions"
    COMPLETION = "completions"
    EMBEDDING = "embeddings"
    PASSED = "passed"  # any other path, whose requests and answers pass unchanged


class PromptMessage(Protocol):
    """One message of a prompt, as its endpoint parsed it. Content parts stay JSON."""

    role: str
    content: str | list[msgspec.Raw] | None


class PromptMedia(msgspec.Struct, frozen=True):
    """The tokens of a prompt's images, sound, video and files.

    `by_kind` has the tokens of each kind by the formula of the model's family. `correction` is added to them, because
    replies have reported other counts. No model counts more than `bound`, so a deployment that reports more is wrong.
    """

    by_kind: tuple[tuple[str, int], ...]
    bound: int
    correction: int = 0

    @property
    def formula_tokens(self) -> int:
        """Tokens by the formula, without the correction."""
        return sum(tokens for _, tokens in self.by_kind)


class Call(msgspec.Struct, frozen=True):
    """One checked request: the immutable context of everything that happens to it.

    Fields that the gateway acts on are typed. The whole body stays in `fields`, each top-level value as the bytes that
    the client sent (or their canonical form), so that unknown fields are passed on untouched.
    """

    id: str
    operation: Operation
    principal: Principal
    policy: Policy
    asked_model: str
    model: Model
    class_name: str
    latency_class: LatencyClass
    stream: bool
    include_usage: bool  # the client asked for the usage chunk
    max_output_tokens: int | None  # over all choices
    deterministic: bool  # temperature 0, a seed, or an embedding: equal calls have equal answers
    fields: dict[str, msgspec.Raw]
    fingerprint: tuple[int, ...]  # chained xxh3-64 of each full block of the prompt's text, salted per tenant
    prompt_tokens_estimate: int  # in the fingerprint's tokens: text bytes / 4, and media by formula
    cache_salt: str
    service_tier: str | None
    end_user: str | None
    canonical_steps: tuple[str, ...]  # names of the transforms that changed something
    class_rule: int | None  # index of the policy rule that chose the class; None: the default
    deadline: float  # event-loop seconds by which the whole reply must be out
    trace: Trace
    read_timeout_seconds: float = math.inf  # the longest time without bytes that the client accepts
    continuous_usage: bool = False  # the client asked for usage in every chunk
    session: str | None = None  # the conversation's name as the client gave it; salted per tenant
    hints: frozenset[str] = frozenset()  # advisory fields, dropped for deployments that do not support them
    cache_slot: int | None = None  # llama.cpp slot that the router chose; None for other dialects
    kv_transfer: msgspec.Raw | None = None  # the router's `kv_transfer_params` (`gateway.core.kv_transfer`)
    media: PromptMedia | None = None  # None if the prompt has text only
    passed: PassedRequest | None = None  # set if the operation is `PASSED`
    wildcard: str = ""  # what the `*` in the model's name stands for
    route: str | None = None  # name of the policy's route that chose the model or its deployments
    routed_model: str | None = None  # name to which a route sent the call; None if the named model answers
    large: bool = False  # work on the whole body takes so long that it must run in the worker thread
    preferred: str | None = None  # deployment that the model's weights chose; None if the cost decides
    native: NativeRequest | None = None  # set if a deployment of the model has the client's API itself
    stored: bool = False  # a chat completion that is stored at its end
    # These follow from the fields before them. Every phase reads them, and a property or a policy's model takes longer.
    model_name: str = ""
    may_be_held: bool = False  # a call in the background: it may be held as long as it may wait, and is patient
    has_prefix: bool = True  # the deployment computes the prompt with a prefix cache
    # `prompt_tokens_estimate`, with what replies taught about media. Routing compares fingerprints, so it ignores it.
    input_tokens_estimate: int = 0

    def __post_init__(self) -> None:
        operation, tokens, media = self.operation, self.prompt_tokens_estimate, self.media
        force_setattr(self, "model_name", self.model.name)
        force_setattr(self, "may_be_held", self.latency_class.is_background)
        force_setattr(self, "has_prefix", operation is Operation.CHAT or operation is Operation.COMPLETION)
        force_setattr(self, "input_tokens_estimate", tokens if media is None else tokens + media.correction)

    @property
    def endpoint_name(self) -> str:
        """The endpoint, as receipts name it: its path without /v1/."""
        return self.operation._value_ if self.passed is None else self.passed.name

    @property
    def tenant_name(self) -> str:
        return self.principal.tenant_name

    @property
    def tenant_path(self) -> tuple[str, ...]:
        """The names of the tenant's ancestors, the outermost first, and its own."""
        return (*self.principal.tenant.parents, self.tenant_name)

    @property
    def media_tokens_bound(self) -> int:
        """The most tokens that any model counts for the prompt's media; 0 if it has text only."""
        return 0 if self.media is None else self.media.bound

    @property
    def tokens_estimate(self) -> int:
        """Input and output tokens that it may use. The queue takes turns between tenants by this."""
        output_tokens = self.max_output_tokens
        if output_tokens is None:
            output_tokens = self.principal.tenant.limits.default_output_tokens
        return self.input_tokens_estimate + output_tokens


class Trace(msgspec.Struct, frozen=True):
    """W3C trace context: 128-bit trace id, the caller's span id (0: none), and the one sampling decision."""

    trace_id: int
    parent_span_id: int
    sampled: bool
    tracestate: str = ""


class TokenCounters(NamedTuple):
    """Tokens that an engine has processed since it started, by its own counters."""

    input: int
    output: int
    unwanted: int = 0  # part of `output` that no answer contains: computed past a stop string

    def since(self, before: TokenCounters) -> TokenCounters:
        """The difference to an earlier reading. A negative field means that the engine restarted."""
        return TokenCounters(*(now - then for now, then in zip(self, before, strict=True)))


class Usage(msgspec.Struct, frozen=True):
    """Tokens consumed, in buckets that do not overlap.

    Parts of a bucket: `reasoning` and `audio_output` of `output`, `audio_input` of `input_uncached`, `cache_write_1h`
    of `cache_write` (cached for an hour instead of minutes), `remainder` of `output` (only the vendor's total has it).
    `units` are not tokens but, for example, searches, in thousandths. If `exact` is false, the counts are an estimate.
    """

    input_uncached: int = 0
    cache_read: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0
    exact: bool = False
    audio_input: int = 0
    audio_output: int = 0
    cache_write_1h: int = 0
    remainder: int = 0
    units: tuple[tuple[str, int], ...] = ()

    @property
    def input(self) -> int:
        return self.input_uncached + self.cache_read + self.cache_write

    @property
    def total(self) -> int:
        return self.input + self.output


class PhaseTimings:
    """When a request entered each phase, in nanoseconds since the epoch.

    Times are the wall clock at the arrival plus monotonic time since. A phase lasts until the next one begins.
    Names are those of the spans: authenticate, canonicalise, cache.lookup, admit, queue, route, chat, settle.
    """

    __slots__ = ("_epoch_ns", "ended_ns", "first_chunk_ns", "phases", "started_ns")

    def __init__(self) -> None:
        self.started_ns = time.time_ns()
        self._epoch_ns = self.started_ns - time.monotonic_ns()
        self.phases: list[tuple[str, int]] = []
        self.first_chunk_ns = 0
        self.ended_ns = 0

    def enter(self, phase: str) -> None:
        self.phases.append((phase, self._epoch_ns + time.monotonic_ns()))

    def between(self, phase: str, later: str) -> int:
        """Nanoseconds from the start of one phase to the start of a later one; 0 if either was not entered."""
        at = dict(self.phases)
        return max(0, at[later] - at[phase]) if phase in at and later in at else 0

    def end(self) -> None:
        self.ended_ns = self.now_ns()

    def now_ns(self) -> int:
        return self._epoch_ns + time.monotonic_ns()


class Outcome(enum.StrEnum):
    """How a call ended, as its receipt states it."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    UPSTREAM_CUT = "upstream_cut"
    TIMEOUT = "timeout"
    BUDGET_SPENT = "budget_spent"  # the gateway cut the stream because its budget was spent
    REFUSED = "refused"  # every attempt was refused or failed before a first chunk
    GATEWAY_LOST = "gateway_lost"  # the gateway was killed; its next start wrote the receipt


class Attempt(msgspec.Struct, frozen=True):
    """One try at one deployment: part of the receipt, and a span of its own."""

    deployment: str
    outcome: str  # "ok", "connect_error", "timeout", "status_503", "cut", "client_gone", ...
    started_ns: int  # since the epoch
    ended_ns: int
    span_id: int
    status: int | None = None
    predicted_cached_tokens: int = 0
    continues: bool = False  # resumes the answer of the attempt that was cut before it
    unbilled: Usage | None = None  # of a cancelled hedge attempt, or of one whose cut stream another one resumed
    blocks_from: str | None = None  # deployment from which it loaded the beginning of the prompt


class UnbilledTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work that is never billed. `exact` if the engine recorded it; else an estimate: the prompt, and what arrived."""

    input: int
    output: int
    exact: bool
    cache_read: int = 0  # part of `input`


class AttemptRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt as its receipt shows it. `complete_receipt` computes the absolute times exactly."""

    span_id: str  # 16 hex digits
    after: float | None = None  # seconds from the receipt's `started` to its own start, to the microsecond
    seconds: float | None = None  # how long it took, to the microsecond
    predicted_cached_tokens: int = 0
    deployment: str | None = None  # None: the receipt's deployment
    outcome: str = "ok"
    status: int | None = 200
    continues: bool = False
    unbilled: UnbilledTokens | None = None
    started: str | None = None  # RFC 3339; in rows of earlier releases, instead of `after` and `seconds`
    ended: str | None = None


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="receipt"):
    """The final record of one call, from which finance bills. One row of the ledger, never changed.

    A row omits fields with their default. msgspec compares identities only, so make a receipt with the default itself,
    not with an equal text. Money is decimal text; `cost` is None if a price is unknown (`unpriced`), never zero.
    """

    event_id: str  # ULID, made by this gateway
    call_id: str
    tenant: str
    key_id: str
    model_asked: str
    model_served: str | None
    deployment: str | None
    started: str  # RFC 3339, UTC, microseconds
    finished: str
    ttft_seconds: float | None
    source: str  # engine, estimate or cache
    input_uncached: int
    cache_read: int
    output: int
    price_version: str | None
    price_input: str | None
    price_cached_input: str | None
    price_output: str | None
    cost: str | None
    currency: str | None
    attempts: tuple[AttemptRow, ...]
    policy_hash: str
    trace_id: str
    operation: str = Operation.CHAT._value_
    latency_class: str = REALTIME
    outcome: str = Outcome.COMPLETE._value_
    end_user: str | None = None
    service_tier: str | None = None
    exact: bool = True
    cache_write: int = 0
    reasoning: int = 0
    price_cache_write: str | None = None
    price_reasoning: str | None = None
    price_audio_input: str | None = None
    price_audio_output: str | None = None
    audio_input: int = 0
    audio_output: int = 0
    price_cache_write_1h: str | None = None
    cache_write_1h: int = 0
    implausible: str | None = None  # why the deployment's counts are not billed, and the counts as it sent them
    remainder: int = 0  # part of `output` that only the vendor's total contains
    units: dict[str, str] = {}  # quantities that are not tokens, by unit
    price_units: dict[str, str] = {}  # price of each of these units, and of `cache_storage`
    list_cost: str | None = None  # before the tenant's factor and exchange rate; None if there are none
    price_factor: str | None = None
    exchange_rate: str | None = None  # from `price_currency` to `currency`
    price_currency: str | None = None  # if it is not `currency`
    region: str | None = None
    leased: bool = False  # the call's limits were taken from slices; crash recovery charges it if it was not reported
    route: str | None = None  # name of the policy's route
    model_routed: str | None = None  # to which a route sent the call, and whose prices apply
    parents: tuple[str, ...] = ()  # names of the tenant's ancestors when the call ended, the outermost first
