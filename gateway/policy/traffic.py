"""Policy models of traffic: latency classes, rules, canonicalisation, caching, routing and tracing."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gateway.policy.fields import Count, CountOrZero, Frozen, Name, Names, Seconds, Share, as_list, parse_duration

Percentile = Literal["p50", "p90", "p95", "p99"]
EndpointName = Literal["chat/completions", "completions", "embeddings", "passed"]
Endpoints = Annotated[
    tuple[EndpointName, ...], BeforeValidator(as_list, json_schema_input_type=EndpointName | tuple[EndpointName, ...])
]


def _parse_hedge_delay(value: Any) -> Any:
    """Parse a percentile or a duration. Pydantic would report an error for each alternative; this reports one."""
    if value in get_args(Percentile):
        return value
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError(f"must be {', '.join(get_args(Percentile))}, or a duration, as in 500ms") from None


class Hedge(Frozen):
    """Hedging: a second attempt, on another deployment, if the first chunk is late.

    The attempt that sends a chunk first wins. The other one is cancelled at once.
    """

    after: Annotated[Percentile | Seconds, BeforeValidator(_parse_hedge_delay)] = Field(
        "p95",
        description="Delay before the second attempt: a percentile of the model's time to first chunk, or a duration.",
    )
    budget: Share = Field(0.05, description="Maximum share of calls that are hedged.")


class Floor(Frozen):
    """Minimum speed at the start of a stream.

    A slower stream is retried on another deployment before the client has received anything.
    """

    chunks: Count = Field(4, description="Chunks that must arrive before the first one is sent to the client.")
    within: Seconds = Field(2.0, description="Time in which they must arrive, counted from the first chunk.")


def _parse_hold(value: Any) -> Any:
    """YAML reads `off` as false. `true` means always, as in policies that have no other choice."""
    return {False: "off", True: "always"}[value] if isinstance(value, bool) else value


class LatencyClass(Frozen):
    """Time limits and queueing of calls. Time limits are counted from when the request has been read."""

    ttft: Seconds = Field(60.0, description="Time to the first chunk of the answer.")
    inter_token: Seconds = Field(30.0, description="Time between two chunks of a stream.")
    total: Seconds = Field(600.0, description="Time to the end of the answer.")
    max_queue: CountOrZero = Field(
        200,
        description="Maximum queued calls per model. Beyond it, a call of the tenant with most queued calls is shed.",
    )
    max_wait: Seconds = Field(10.0, description="Maximum time in the queue.")
    priority: int = Field(0, description="Lower values go first. Also sent to engines that schedule by priority.")
    min_share: Share = Field(
        0.0,
        description="Minimum share of a model's capacity, in tokens, while calls of this class are queued, whatever "
        "the priority of other classes.",
    )
    hold: Annotated[
        Literal["off", "always", "auto"],
        BeforeValidator(_parse_hold, json_schema_input_type=Literal["off", "always", "auto"] | bool),
    ] = Field(
        "off",
        description="Also queue calls of this class while their conversations do not fit into the prefix caches. "
        "always: whenever they do not fit. auto: only while that is expected to serve more calls.",
    )
    hold_max: Seconds | None = Field(
        None,
        description="For hold: auto: the longest time for which a call is held. Then it is sent although its "
        "conversation does not fit. Default: `max_wait`, and the class counts as background, whose calls leave free "
        "slots to other classes.",
    )
    hedge: Hedge | None = Field(None, description="Send a second attempt if the first is late. Default: never.")
    floor: Floor | None = Field(None, description="Retry streams that start too slowly. Default: never.")
    continue_cut_streams: bool = Field(
        True,
        description="Resume a cut text stream on another deployment, which continues the text that the client has "
        "received.",
    )
    service_tiers: Names = Field(
        (), description="Service tiers that may lower the price of calls of this class, beside those of the tenant."
    )
    retries: Share = Field(
        0.2, description="Retry budget: attempts beyond the first, as a share of the calls of this class."
    )

    @cached_property
    def is_background(self) -> bool:
        """Whether calls are held without a bound but `max_wait`, and leave free slots to other classes."""
        return self.hold == "always" or (self.hold == "auto" and self.hold_max is None)


def _lower_names(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Match(Frozen):
    """Conditions on a call. All given conditions must match. A list of one name may be written as the name."""

    model: Names | None = Field(None, description="The requested model is one of these, as in gpt-4o or openai/*.")
    endpoint: Endpoints | None = Field(
        None,
        description="The endpoint is one of these, below /v1/. Calls to Responses and Messages are chat/completions, "
        "because that is what deployments receive. Requests that pass unchanged, such as reranks, are passed.",
    )
    tenant: Names | None = Field(None, description="The tenant is one of these.")
    key: Names | None = Field(None, description="The key id is one of these.")
    service_tier: Names | None = Field(None, description="The body's service_tier is one of these.")
    header: Annotated[dict[str, str], AfterValidator(_lower_names)] | None = Field(
        None, description="Each header has exactly this value. Names are case-insensitive."
    )
    metadata: dict[str, str] | None = Field(None, description="Each key of the body's metadata has exactly this value.")
    tag: Names | None = Field(
        None,
        description="One of these is a tag of the call: in `tags` of the body's metadata, a list or a text with "
        "commas, or in the header x-tags.",
    )
    min_prompt_tokens: Count | None = Field(None, description="The prompt has at least this many tokens (estimated).")


class Rule(Frozen):
    """Assigns a latency class to matching calls. The first matching rule decides."""

    match: Match = Field(description="Conditions on the call. {} matches all calls.")
    latency_class: Name = Field(alias="class", description="Latency class of matching calls.")


OptIn = Literal["volatile_to_end", "volatile_to_user", "tool_order", "property_order", "chunk_order", "template_date"]


class CanonicalForm(Frozen):
    """How much a prompt may be changed so that prefixes become cacheable."""

    level: Literal["off", "safe", "full"] = Field(
        "safe",
        description="safe: transforms that keep the prompt's tokens (P0) or the meaning of schemas (P1), and those "
        "that remove known noise (P2). full: also those that `opt_in` names. off: none.",
    )
    opt_in: tuple[OptIn, ...] = Field((), description="Names of transforms that change what the model reads (P3).")
    template_date: Name | None = Field(
        None,
        description="Date for chat templates that print today's, as in 26 Jul 2024. Needs the opt_in of this name.",
    )

    @model_validator(mode="after")
    def _opt_in_is_consistent(self) -> Self:
        if self.opt_in and self.level != "full":
            raise ValueError("opt_in needs level: full")
        if ("template_date" in self.opt_in) != (self.template_date is not None):
            raise ValueError("template_date must be set if opt_in names it, and only then")
        return self


class CanonicalFormException(CanonicalForm):
    """Another canonical form for some tenants or models. Unset fields have their defaults, not the values above."""

    tenant: Names | None = Field(None, description="The tenant is one of these.")
    model: Names | None = Field(None, description="The requested model is one of these, by name and not by alias.")


class Canonicalise(CanonicalForm):
    """How much prompts may be changed so that prefixes become cacheable, with exceptions."""

    exceptions: tuple[CanonicalFormException, ...] = Field(
        (), description="Tenants or models with another canonical form. The first match decides."
    )

    def form_for(self, tenant: str, model: str) -> CanonicalForm:
        """The canonical form for a tenant and a model: the first matching exception, or else the general form."""
        for exception in self.exceptions:
            if (exception.tenant is None or tenant in exception.tenant) and (
                exception.model is None or model in exception.model
            ):
                return exception
        return self


class Diagnosis(Frozen):
    """Summaries of sampled calls, without their text, for `warmpath doctor`."""

    sample: Share = Field(0.0, description="Share of conversations whose prompts are compared. 0: none.")
    content: bool = Field(False, description="Also record the few words around each break, unredacted.")


class Cache(Frozen):
    """Exact response cache: equal requests of one tenant (or key) are answered from the cache."""

    ttl: Seconds = Field(600.0, description="How long an answer is cached.")
    scope: Literal["off", "tenant", "key"] = Field("tenant", description="Who shares cached answers. off: no caching.")
    when: Literal["deterministic", "always"] = Field(
        "deterministic",
        description="deterministic: cache only calls with temperature 0 or a seed, and embeddings. always: all calls.",
    )
    max_answer_bytes: Count = Field(1_000_000, description="Longer answers are not cached.")


class Routing(Frozen):
    """Routing of calls to deployments."""

    strategy: Literal["prefix_affinity", "least_busy", "round_robin"] = Field(
        "prefix_affinity",
        description="prefix_affinity: the deployment with the prompt's prefix in its cache, unless the wait there "
        "costs more than computing the prompt again. least_busy and round_robin ignore prompts.",
    )
    remote_prefill_above: Seconds = Field(
        0.2,
        description="For deployments with a `role`: a prompt is computed by a prefill deployment if its uncached part "
        "is predicted to take the decode deployment longer than this. Shorter parts are computed where the answer is.",
    )
    log: bool = Field(
        False, description="Log each decision, with what was predicted and what came of it, for `warmpath route-log`."
    )


class Tracing(Frozen):
    """Traces of requests."""

    sample: Share = Field(1.0, description="Share of requests that are traced if the client's headers do not decide.")


REALTIME = "realtime"
# Seconds. A policy that names one of these classes overrides single fields (`Policy._built_in_classes`).
BUILT_IN_CLASSES: dict[str, dict[str, Any]] = {
    REALTIME: {
        "ttft": 60.0,
        "inter_token": 30.0,
        "total": 600.0,
        "max_queue": 200,
        "max_wait": 10.0,
        "priority": 0,
        "hold_max": 5.0,
    },
    "batch": {
        "ttft": 3600.0,
        "inter_token": 300.0,
        "total": 86400.0,
        "max_queue": 100_000,
        "max_wait": 3600.0,
        "priority": 10,
        "hold": "always",
    },
}
