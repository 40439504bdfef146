"""Who may call, and how much each may use."""

from __future__ import annotations

from decimal import Decimal
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.policy.fields import Count, Frozen, Name, Names, Seconds, Share, parse_rate
from gateway.policy.responses import Responses

BUDGET_MAX = 4_000_000_000  # in billionths, and twice, it is a number of 64 bits, as storages have them


class Rate(Frozen):
    amount: Count = Field(description="How much.")
    period: Seconds = Field(description="Per how long.")


class Budget(Frozen):
    amount: Decimal = Field(
        gt=0, le=BUDGET_MAX, description="Money that may be spent per period, in the currency of the prices."
    )
    per: Literal["hour", "day", "week", "month", "total"] = Field(
        "month", description="Calendar period, UTC; weeks begin on Monday."
    )
    cut_streams: bool = Field(
        False,
        description="End a stream, with an error, once it has cost more than was reserved for it and nothing is left.",
    )


_PerPeriod = Annotated[str, Field(pattern=r"^\d+(\.\d+)?[kKMG]?/\d+(\.\d+)?\s*(ms|s|m|h|d)$")]
RateField = Annotated[Rate, BeforeValidator(parse_rate, json_schema_input_type=_PerPeriod | Rate)]


class Limits(Frozen):
    """What may be used. What is left out is unlimited."""

    requests: RateField | None = Field(None, description="Requests, as in 600/1m.")
    tokens: RateField | None = Field(None, description="Tokens, input and output together, as in 1M/1m.")
    input_tokens: RateField | None = Field(None, description="Input tokens, as in 800k/1m.")
    output_tokens: RateField | None = Field(None, description="Output tokens, reasoning included, as in 200k/1m.")
    cached_input_weight: Share | None = Field(
        None,
        description="How much of an input token counts that was read from a prefix cache, once that is known. "
        "Left out: as the tenant's limits say; there: 100%.",
    )
    concurrency: Count | None = Field(None, description="Calls in flight at the same time.")
    budget: Budget | None = Field(None, description="Money.")


class PartMatch(Frozen):
    """Which of a tenant's calls; all that is given must hold."""

    model: Names | None = Field(None, description="The model is one of these, by name or alias.")
    latency_class: Names | None = Field(None, alias="class", description="The latency class is one of these.")

    @model_validator(mode="after")
    def _some_condition(self) -> PartMatch:
        if self.model is None and self.latency_class is None:
            raise ValueError("name a model or a class; what holds for all calls stands in the limits themselves")
        return self

    @cached_property
    def label(self) -> str:
        """How its limits are named to people, and kept: `model a, b and class batch`."""
        conditions = (("model", self.model), ("class", self.latency_class))
        return " and ".join(f"{what} {', '.join(sorted(names))}" for what, names in conditions if names is not None)


class PartLimits(Limits):
    """Limits that the calls of one part share."""

    match: PartMatch = Field(description="Which calls.")


class TenantLimits(Limits):
    """What a tenant may use, and parts of its calls. What is left out is unlimited."""

    parts: tuple[PartLimits, ...] = Field(
        (), description="Further limits, for parts of its calls. Of several that match, all hold."
    )
    default_output_tokens: Count = Field(
        1024, description="Output tokens reserved for a call that sets no max_tokens; settled to the truth afterwards."
    )


class Key(Frozen):
    id: str = Field(pattern="^[a-z0-9][a-z0-9_]{0,62}$", description="Public part of the key wp-<id>-<secret>.")
    hash: str = Field(pattern="^hmac-sha256:[0-9a-f]{64}$", description="As `warmpath keys hash` prints it.")
    models: tuple[Name, ...] | None = Field(None, description="Models that this key may use; left out: all.")
    classes: tuple[Name, ...] | None = Field(None, description="Latency classes that it may use; left out: all.")
    limits: Limits | None = Field(None, description="What this key may use, within what its tenant may.")


class Tenant(Frozen):
    name: Name = Field(description="Who is billed.")
    keys: tuple[Key, ...] = Field((), description="Keys kept in this file; others are kept in the storage.")
    models: tuple[Name, ...] | None = Field(None, description="Models that the tenant may use; left out: all.")
    limits: TenantLimits = Field(TenantLimits(), description="What it may use.")
    cache_group: Name | None = Field(
        None,
        description="Tenants of one group share prefix caches, and can tell by time and counts what the others have "
        "sent; left out: it shares with nobody.",
    )
    responses: Responses | None = Field(
        None, description="What is kept of its responses; left out: as for all tenants."
    )


class StorageOutage(Frozen):
    """What holds while the storage does not answer."""

    limits: Literal["refuse", "local_share"] = Field(
        "refuse",
        description="refuse: calls that have limits get a 503. local_share: each gateway goes on with its share of "
        "every limit, and tells the storage afterwards.",
    )
    replicas: Count | None = Field(
        None, description="Among how many gateways limits are shared then; left out: as many as the storage last knew."
    )
