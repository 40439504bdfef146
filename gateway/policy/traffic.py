"""What is preferred: latency classes, the rules that choose them, canonicalising, caching, tracing."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gateway.policy.fields import Count, CountOrZero, Frozen, Name, Names, Seconds, Share, as_list, parse_duration

Percentile = Literal["p50", "p90", "p95", "p99"]
EndpointName = Literal["chat/completions", "completions", "embeddings"]
Endpoints = Annotated[
    tuple[EndpointName, ...], BeforeValidator(as_list, json_schema_input_type=EndpointName | tuple[EndpointName, ...])
]


def _how_late(value: Any) -> Any:
    """One message for the whole choice, and not one for each of its halves."""
    if value in get_args(Percentile):
        return value
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError(f"should be {', '.join(get_args(Percentile))}, or a duration, as in 500ms") from None


class Hedge(Frozen):
    """Asking a second server when the first one is late. The first chunk decides; the loser is cancelled at once."""

    after: Annotated[Percentile | Seconds, BeforeValidator(_how_late)] = Field(
        "p95", description="How late: a percentile of the model's times to the first chunk, or a duration."
    )
    budget: Share = Field(0.05, description="Share of the calls that may be sent twice.")


class Floor(Frozen):
    """How fast a stream must begin. One that does not is given to another server before anything was sent."""

    chunks: Count = Field(4, description="So many chunks are waited for before the first is sent on.")
    within: Seconds = Field(2.0, description="So long after the first of them.")


class LatencyClass(Frozen):
    """How long a call may take, and how it queues. Time limits start when the request has been read."""

    ttft: Seconds = Field(60.0, description="Until the first chunk of the answer.")
    inter_token: Seconds = Field(30.0, description="Between two chunks of a stream.")
    total: Seconds = Field(600.0, description="Until the end of the answer.")
    max_queue: CountOrZero = Field(
        200, description="Calls that may wait for a model; with one more, one of the tenant that has most gives way."
    )
    max_wait: Seconds = Field(10.0, description="How long a call may wait for its turn.")
    priority: int = Field(0, description="Lower goes first; engines that know priorities are told.")
    min_share: Share = Field(
        0.0,
        description="Of what a model's calls are given while this class waits, in tokens, so much goes to it, however "
        "urgent the others are.",
    )
    hold: bool = Field(
        False, description="Its calls wait for their turn, too, while their conversations do not fit into the caches."
    )
    hedge: Hedge | None = Field(None, description="Ask a second server when the first is late; left out: never.")
    floor: Floor | None = Field(None, description="Replace streams that begin too slowly; left out: never.")
    continue_cut_streams: bool = Field(
        False,
        description="A stream of text that a server breaks off goes on at another one, with what the client has got as "
        "its beginning.",
    )
    retries: Share = Field(
        0.2, description="Attempts beyond the first that calls of this class may cause, as a share of the calls."
    )


def _lower_names(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Match(Frozen):
    """Conditions on a call; all that are given must hold. One name may stand without its list."""

    model: Names | None = Field(None, description="The model asked for is one of these.")
    endpoint: Endpoints | None = Field(
        None,
        description="It was posted to one of these, behind /v1/. Responses and Messages are chat/completions, which is "
        "what servers are asked for.",
    )
    tenant: Names | None = Field(None, description="The tenant is one of these.")
    key: Names | None = Field(None, description="The key id is one of these.")
    service_tier: Names | None = Field(None, description="The body's service_tier is one of these.")
    header: Annotated[dict[str, str], AfterValidator(_lower_names)] | None = Field(
        None, description="Each header has exactly this value; names in any case."
    )
    metadata: dict[str, str] | None = Field(None, description="Each key of the body's metadata has this value.")
    min_prompt_tokens: Count | None = Field(None, description="The prompt has at least so many tokens (estimated).")


class Rule(Frozen):
    """The first rule that matches decides a call's latency class."""

    match: Match = Field(description="Which calls; {} is all of them.")
    latency_class: Name = Field(alias="class", description="The latency class that it gives.")


OptIn = Literal["volatile_to_end", "volatile_to_user", "tool_order", "template_date"]


class CanonicalForm(Frozen):
    """How far a prompt may be changed to make it cache-friendly."""

    level: Literal["off", "safe", "full"] = Field(
        "safe",
        description="safe: what leaves the prompt's tokens (P0) or the meaning of schemas (P1) as they are, and what "
        "removes known noise (P2). full: what `opt_in` names besides. off: nothing.",
    )
    opt_in: tuple[OptIn, ...] = Field((), description="Transforms that change what the model reads (P3), by name.")
    template_date: Name | None = Field(
        None, description="The date for templates that print today's, as in 26 Jul 2024; for the opt_in of this name."
    )

    @model_validator(mode="after")
    def _asked_for_as_a_whole(self) -> Self:
        if self.opt_in and self.level != "full":
            raise ValueError("opt_in needs level: full")
        if ("template_date" in self.opt_in) != (self.template_date is not None):
            raise ValueError("a template_date is given if, and only if, opt_in names it")
        return self


class CanonicalFormException(CanonicalForm):
    """Another form for some calls. What is left out here is as where nothing is said, and not as for the others."""

    tenant: Names | None = Field(None, description="The tenant is one of these.")
    model: Names | None = Field(None, description="The model asked for is one of these, by name.")


class Canonicalise(CanonicalForm):
    exceptions: tuple[CanonicalFormException, ...] = Field(
        (), description="Tenants or models with another form; the first that matches decides."
    )

    def form_for(self, tenant: str, model: str) -> CanonicalForm:
        for exception in self.exceptions:
            if (exception.tenant is None or tenant in exception.tenant) and (
                exception.model is None or model in exception.model
            ):
                return exception
        return self


class Diagnosis(Frozen):
    """What `warmpath doctor` reads: a summary of each sampled call, without its text."""

    sample: Share = Field(0.0, description="Share of conversations whose prompts are compared; 0: none are.")
    content: bool = Field(False, description="Also keep the few words around each break, as they were sent.")


class Cache(Frozen):
    """The exact response cache: equal requests of one tenant (or key) are answered from memory."""

    ttl: Seconds = Field(600.0, description="How long an answer is kept.")
    scope: Literal["off", "tenant", "key"] = Field("tenant", description="Who shares answers. off: nobody.")
    when: Literal["deterministic", "always"] = Field(
        "deterministic", description="deterministic: only calls with temperature 0 or a seed, and embeddings."
    )
    max_answer_bytes: Count = Field(1_000_000, description="Longer answers are not kept.")


class Routing(Frozen):
    strategy: Literal["prefix_affinity", "least_busy", "round_robin"] = Field(
        "prefix_affinity",
        description="prefix_affinity: where the prompt is warm, unless waiting there costs more than computing anew; "
        "least_busy and round_robin look at no prompt.",
    )


class Tracing(Frozen):
    sample: Share = Field(1.0, description="Share of requests traced when the caller has not decided.")


BUILT_IN_CLASSES: dict[str, dict[str, Any]] = {
    "realtime": {"ttft": 60.0, "inter_token": 30.0, "total": 600.0, "max_queue": 200, "max_wait": 10.0, "priority": 0},
    "batch": {
        "ttft": 3600.0,
        "inter_token": 300.0,
        "total": 86400.0,
        "max_queue": 100_000,
        "max_wait": 3600.0,
        "priority": 10,
        "hold": True,
    },
}
