"""What flows through the gateway: `Principal -> Call -> Reservation -> Upstream -> Usage -> Receipt`.

Everything here is frozen; a phase returns something new and writes on nothing that it was given.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Collection
from typing import NamedTuple, Protocol

import msgspec

from gateway.policy import LatencyClass, Limits, Model, Policy, Tenant


class Principal(msgspec.Struct, frozen=True):
    """Who calls: a key of a tenant. `models` and `classes` are None where the key may use every one."""

    tenant: Tenant
    key_id: str
    models: frozenset[str] | None = None
    classes: frozenset[str] | None = None
    limits: Limits | None = None  # the key's own, within its tenant's

    def tenant_may_use(self, model: Model) -> bool:
        return _names_one_of(self.tenant.models, model)

    def may_use(self, model: Model) -> bool:
        return self.tenant_may_use(model) and _names_one_of(self.models, model)


def _names_one_of(allowed: Collection[str] | None, model: Model) -> bool:
    return allowed is None or any(name in allowed for name in (model.name, *model.aliases))


class Operation(enum.StrEnum):
    """What is asked for. The value is the path behind `/v1/`; GenAI operation names are telemetry's business."""

    CHAT = "chat/completions"
    COMPLETION = "completions"
    EMBEDDING = "embeddings"


class PromptMessage(Protocol):
    """One message of a prompt, as its door has read it; parts are kept as JSON."""

    role: str
    content: str | list[msgspec.Raw] | None


class Call(msgspec.Struct, frozen=True):
    """One request, checked: the immutable context of everything that happens to it.

    What we act on is typed; the whole body stays in `fields`, each top-level value as the bytes the client sent
    (or their canonical form), so that what we do not know is passed on untouched.
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
    prompt_tokens_estimate: int
    cache_salt: str
    service_tier: str | None
    end_user: str | None
    canonical_steps: tuple[str, ...]  # names of the transforms that changed something
    class_rule: int | None  # index of the policy rule that chose the class; None: the default
    deadline: float  # event-loop seconds by which the whole reply must be out
    trace: Trace
    read_timeout_seconds: float = math.inf  # of the client, for the next bytes of its answer
    continuous_usage: bool = False  # the client asked for counts in every chunk, too
    session: str | None = None  # the conversation's name, as its client gave it; salted per tenant
    hints: frozenset[str] = frozenset()  # fields that only advise: a server that can not heed them may go without
    cache_slot: int | None = None  # at a server that has some: set for it by the router

    @property
    def may_be_held(self) -> bool:
        """Between two turns, while the caches are full of others' conversations."""
        return self.latency_class.hold

    @property
    def tenant_name(self) -> str:
        return self.principal.tenant.name

    @property
    def tokens_estimate(self) -> int:
        """What it may use, input and output: by this tenants take turns."""
        output_tokens = self.max_output_tokens
        if output_tokens is None:
            output_tokens = self.principal.tenant.limits.default_output_tokens
        return self.prompt_tokens_estimate + output_tokens


class Trace(msgspec.Struct, frozen=True):
    """W3C trace context: 128-bit trace id, the caller's span id (0: none), and the one sampling decision."""

    trace_id: int
    parent_span_id: int
    sampled: bool
    tracestate: str = ""


class TokenCounters(NamedTuple):
    """Tokens that a server has worked on since it started, by its own count."""

    input: int
    output: int
    unwanted: int = 0  # of the output, what is in no answer: computed behind a stop string before that was found

    def since(self, before: TokenCounters) -> TokenCounters:
        """Negative somewhere where the server has started anew."""
        return TokenCounters(*(now - then for now, then in zip(self, before, strict=True)))


class Usage(msgspec.Struct, frozen=True):
    """Tokens consumed, in buckets that do not overlap. `reasoning` is the part of `output` spent thinking, and
    `audio_output` the part that was sound; `audio_input` is a part of `input_uncached`, and `cache_write_1h` the part
    of `cache_write` that its cache keeps for an hour and not for minutes.

    `exact` is True only when the engine that did the work counted; everything else is marked as an estimate.
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

    @property
    def input(self) -> int:
        return self.input_uncached + self.cache_read + self.cache_write

    @property
    def total(self) -> int:
        return self.input + self.output


class PhaseTimings:
    """When a request entered each phase, in nanoseconds since the epoch.

    By the wall clock as it was at the request's arrival: whoever sets that clock meanwhile, changes no duration.
    A phase lasts until the next one begins, so the phases of a request add up to its time by construction.
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
        self.phases.append((phase, self.now_ns()))

    def between(self, phase: str, later: str) -> int:
        """Nanoseconds from the beginning of one phase to that of a later one; 0 where one was not entered."""
        at = dict(self.phases)
        return max(0, at[later] - at[phase]) if phase in at and later in at else 0

    def end(self) -> None:
        self.ended_ns = self.now_ns()

    def now_ns(self) -> int:
        return self._epoch_ns + time.monotonic_ns()


class Outcome(enum.StrEnum):
    """How a call ended, as its receipt says it."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    UPSTREAM_CUT = "upstream_cut"
    TIMEOUT = "timeout"
    BUDGET_SPENT = "budget_spent"  # cut here, because the policy says so: there was no more money for it
    REFUSED = "refused"  # the upstreams refused or failed before a first chunk
    GATEWAY_LOST = "gateway_lost"  # the gateway was killed meanwhile; its next start has written the receipt


class Attempt(msgspec.Struct, frozen=True):
    """One try at one deployment: part of the receipt, and a span of its own."""

    deployment: str
    outcome: str  # "ok", "connect_error", "timeout", "status_503", "cut", "client_gone", ...
    started_ns: int  # since the epoch
    ended_ns: int
    span_id: int
    status: int | None = None
    predicted_cached_tokens: int = 0
    continues: bool = False  # with the text of the answer that was cut before it
    unbilled: Usage | None = None  # of one that lost a race


class UnbilledTokens(msgspec.Struct, frozen=True):
    """What a server has done in vain; `exact` by its own record, else the most that the prompt may have cost it."""

    input: int
    output: int
    exact: bool


class AttemptRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt as its receipt has it."""

    deployment: str
    outcome: str
    status: int | None
    started: str  # RFC 3339, as in the receipt
    ended: str
    span_id: str  # 16 hex digits
    predicted_cached_tokens: int
    continues: bool = False
    unbilled: UnbilledTokens | None = None


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="receipt"):
    """The final record of one call: what finance bills from. One row of the ledger, never changed. What has a default
    is left out of the row where it has that value.

    Money is decimal text; `cost` is None where a price is unknown (`unpriced`), never zero.
    """

    event_id: str  # ULID, made here
    call_id: str
    tenant: str
    key_id: str
    end_user: str | None
    operation: str
    model_asked: str
    model_served: str | None
    deployment: str | None
    latency_class: str
    service_tier: str | None
    started: str  # RFC 3339, UTC, microseconds
    finished: str
    ttft_seconds: float | None
    outcome: str
    source: str  # engine, estimate or cache
    exact: bool
    input_uncached: int
    cache_read: int
    cache_write: int
    output: int
    reasoning: int
    price_version: str | None
    price_input: str | None
    price_cached_input: str | None
    price_output: str | None
    cost: str | None
    currency: str | None
    attempts: tuple[AttemptRow, ...]
    policy_hash: str
    trace_id: str
    price_cache_write: str | None = None
    price_reasoning: str | None = None
    price_audio_input: str | None = None
    price_audio_output: str | None = None
    audio_input: int = 0
    audio_output: int = 0
    price_cache_write_1h: str | None = None
    cache_write_1h: int = 0
