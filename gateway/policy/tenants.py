"""Policy models of tenants: their keys, and the limits of tenants, keys and parts of a tenant's calls."""

from __future__ import annotations

from decimal import Decimal
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.policy.fields import Count, Frozen, Name, Names, Seconds, Share, parse_rate
from gateway.policy.responses import Responses
from gateway.policy.tenant_prices import Currency, PriceAdjustment

BUDGET_MAX = 4_000_000_000  # twice this, in billionths, fits the 64-bit integers of the storage


class Rate(Frozen):
    """An amount per period."""

    amount: Count = Field(description="Amount per period.")
    period: Seconds = Field(description="Length of the period.")


class Budget(Frozen):
    """Money per calendar period."""

    amount: Decimal = Field(
        gt=0, le=BUDGET_MAX, description="Money that may be spent per period, in the currency of the prices."
    )
    per: Literal["hour", "day", "week", "month", "total"] = Field(
        "month", description="Calendar period in UTC. Weeks begin on Monday."
    )
    cut_streams: bool = Field(
        False,
        description="End a stream with an error if it costs more than its reservation and the budget is spent.",
    )
    soft: bool = Field(
        False, description="The budget only warns, by webhooks, metrics and the dashboard. It refuses no call."
    )


_PerPeriod = Annotated[str, Field(pattern=r"^\d+(\.\d+)?[kKMG]?/\d+(\.\d+)?\s*(ms|s|m|h|d)$")]
RateField = Annotated[Rate, BeforeValidator(parse_rate, json_schema_input_type=_PerPeriod | Rate)]


class Limits(Frozen):
    """Limits on use. A limit that is not set is unlimited."""

    requests: RateField | None = Field(None, description="Requests, as in 600/1m.")
    tokens: RateField | None = Field(None, description="Tokens, input and output together, as in 1M/1m.")
    input_tokens: RateField | None = Field(None, description="Input tokens, as in 800k/1m.")
    output_tokens: RateField | None = Field(None, description="Output tokens, reasoning included, as in 200k/1m.")
    cached_input_weight: Share | None = Field(
        None,
        description="How much an input token counts if it was read from a prefix cache. Applied when the reply "
        "reports it. Default: the tenant's value, and 100% for tenants.",
    )
    concurrency: Count | None = Field(None, description="Calls in flight at the same time.")
    budget: Budget | None = Field(None, description="Money that may be spent.")


class PartMatch(Frozen):
    """Selects a part of a tenant's calls. All given conditions must match."""

    model: Names | None = Field(None, description="The model is one of these, by name or alias.")
    latency_class: Names | None = Field(None, alias="class", description="The latency class is one of these.")

    @model_validator(mode="after")
    def _has_a_condition(self) -> PartMatch:
        if self.model is None and self.latency_class is None:
            raise ValueError("must name a model or a class; limits for all calls belong in `limits` itself")
        return self

    @cached_property
    def label(self) -> str:
        """Name of the part in messages and in storage keys: `model a, b and class batch`."""
        conditions = (("model", self.model), ("class", self.latency_class))
        return " and ".join(f"{what} {', '.join(sorted(names))}" for what, names in conditions if names is not None)


class PartLimits(Limits):
    """Limits that the matching calls of a tenant share."""

    match: PartMatch = Field(description="Calls that share these limits.")


class TenantLimits(Limits):
    """Limits on all of a tenant's calls, and on subsets of them. A limit that is not set is unlimited."""

    parts: tuple[PartLimits, ...] = Field(
        (), description="Further limits for subsets of its calls. If several of them match a call, all of them apply."
    )
    default_output_tokens: Count = Field(
        1024,
        description="Output tokens that limits of tokens reserve for a call without max_tokens. Settled to actual "
        "usage at the end. Budgets reserve the model's `max_output_tokens`.",
    )
    cap_output: Literal["max_tokens", "max_completion_tokens"] | None = Field(
        None,
        description="Set this field to `default_output_tokens` in calls that set no bound, so that they reserve and "
        "generate no more. Completions always get max_tokens. Default: their output is not capped.",
    )
    end_users: Limits | None = Field(
        None,
        description="Limits of each end user, by the call's `safety_identifier` or `user`. Calls without one share the "
        "limits of one end user.",
    )


class Key(Frozen):
    """An API key in the policy file, stored as its hash."""

    id: str = Field(pattern="^[a-z0-9][a-z0-9_]{0,62}$", description="Public part of the key wp-<id>-<secret>.")
    hash: str = Field(
        pattern="^hmac-sha256:[0-9a-f]{64}$", description="Hash of the key, as `warmpath keys hash` prints it."
    )
    models: tuple[Name, ...] | None = Field(
        None, description="Models that this key may use. Default: all of its tenant's."
    )
    classes: tuple[Name, ...] | None = Field(None, description="Latency classes that this key may use. Default: all.")
    limits: Limits | None = Field(None, description="Limits of this key, within those of its tenant.")


class TenantFields(Frozen):
    """The fields of a tenant that can be in the policy and in the storage."""

    name: Name = Field(description="Name in receipts and bills.")
    parent: Name | None = Field(
        None,
        description="Tenant to which it belongs, as a project to an organisation. Its calls also count towards all "
        "limits of its parent, of that one's parent, and so on.",
    )
    disabled: bool = Field(
        False, description="Whether calls of the tenant and of all tenants below it are rejected. Its keys stay."
    )
    models: tuple[Name, ...] | None = Field(
        None, description="Models that the tenant may use, of those that its parent may use. Default: all of them."
    )
    limits: TenantLimits = Field(TenantLimits(), description="Limits of the tenant.")
    cache_group: Name | None = Field(
        None,
        description="Tenants of one group share prefix caches, and can infer from latency and token counts what the "
        "others have sent. Default: shared with no other tenant.",
    )


class Tenant(TenantFields):
    """An organisation, project, team, user or customer: it owns keys, has limits and is billed.

    The policy's lookups and the directory of stored tenants return tenants with the values that they inherit from their
    ancestors (`gateway.policy.hierarchy`). If an ancestor changes, they return a new object.
    """

    keys: tuple[Key, ...] = Field(
        (), description="Keys in this file. Keys made with `warmpath keys` are in the storage."
    )
    pricing: tuple[PriceAdjustment, ...] = Field(
        (),
        description="Markups and discounts on list prices, of which the first that applies to a call is used. Default: "
        "those of its parent.",
    )
    currency: Currency | None = Field(
        None,
        description="Currency of its bills, by the policy's `exchange_rates`. Default: that of its parent, or of the "
        "prices.",
    )
    service_tiers: Names = Field(
        (),
        description="Service tiers that may lower its prices. A request for another tier never makes it cheaper. "
        "Default: those of its parent.",
    )
    responses: Responses | None = Field(
        None, description="How its responses are stored. Default: as its parent's, or the policy's `responses`."
    )

    # Not in the file: `gateway.policy.hierarchy` sets the first two, and the others follow from them.

    @cached_property
    def ancestors(self) -> tuple[Tenant, ...]:
        """Its parent, the parent's parent and so on, the outermost first."""
        return ()

    @cached_property
    def priced_as(self) -> str:
        """The name of the tenant of the policy whose prices it has: its own, or that of its nearest ancestor."""
        return self.name

    @cached_property
    def root(self) -> str:
        """The name of its outermost ancestor, or its own. One storage operation reserves limits of one root only."""
        return self.ancestors[0].name if self.ancestors else self.name

    @cached_property
    def parents(self) -> tuple[str, ...]:
        """The names of its ancestors, the outermost first."""
        return tuple(each.name for each in self.ancestors)

    @cached_property
    def is_disabled(self) -> bool:
        """Whether it or one of its ancestors is disabled."""
        return any(each.disabled for each in (*self.ancestors, self))

    @cached_property
    def model_lists(self) -> tuple[tuple[Name, ...], ...]:
        """The lists of models of the tenant and its ancestors. A model must be in all of them."""
        return tuple(each.models for each in (*self.ancestors, self) if each.models is not None)


class StorageOutage(Frozen):
    """How limits are enforced while the storage does not answer."""

    limits: Literal["refuse", "local_share"] = Field(
        "refuse",
        description="refuse: calls with limits get a 503. local_share: each gateway enforces its share of every limit "
        "and reports to the storage afterwards.",
    )
    replicas: Count | None = Field(
        None,
        description="Number of gateways among which limits are then divided. Default: the number last known to the "
        "storage.",
    )
