"""What is preferred: latency classes, the rules that choose them, canonicalising, caching, tracing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gateway.policy.fields import Count, CountOrZero, Frozen, Name, Names, Seconds, Share


class Hedge(Frozen):
    """Asking a second server when the first one is late. The first chunk decides; the loser is cancelled at once."""

    after: Literal["p50", "p90", "p95", "p99"] | Seconds = Field(
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
    max_queue: CountOrZero = Field(200, description="Calls that may wait for a deployment pool; one more is refused.")
    max_wait: Seconds = Field(10.0, description="How long a call may wait for its turn.")
    priority: int = Field(0, description="Lower goes first; engines that know priorities are told.")
    hedge: Hedge | None = Field(None, description="Ask a second server when the first is late; left out: never.")
    floor: Floor | None = Field(None, description="Replace streams that begin too slowly; left out: never.")
    retries: Share = Field(
        0.2, description="Attempts beyond the first that calls of this class may cause, as a share of the calls."
    )


def _lower_names(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Match(Frozen):
    """Conditions on a call; all that are given must hold. One name may stand without its list."""

    model: Names | None = Field(None, description="The model asked for is one of these.")
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


class Canonicalise(Frozen):
    level: Literal["off", "safe"] = Field(
        "safe", description="safe: transforms that provably leave the prompt's tokens as they are (P0)."
    )


class Cache(Frozen):
    """The exact response cache: equal requests of one tenant (or key) are answered from memory."""

    ttl: Seconds = Field(600.0, description="How long an answer is kept.")
    scope: Literal["off", "tenant", "key"] = Field("tenant", description="Who shares answers. off: nobody.")
    when: Literal["deterministic", "always"] = Field(
        "deterministic", description="deterministic: only calls with temperature 0 or a seed, and embeddings."
    )
    max_answer_bytes: Count = Field(1_000_000, description="Longer answers are not kept.")


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
    },
}
