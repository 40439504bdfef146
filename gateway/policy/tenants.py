"""Who may call, and how much each may use."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.policy.fields import Count, Frozen, Name, Seconds, parse_rate


class Rate(Frozen):
    amount: Count = Field(description="How much.")
    period: Seconds = Field(description="Per how long.")


class Budget(Frozen):
    amount: Decimal = Field(gt=0, description="Money that may be spent per period, in the currency of the prices.")
    per: Literal["day", "month", "total"] = Field("month", description="Calendar period, UTC.")


_PerPeriod = Annotated[str, Field(pattern=r"^\d+(\.\d+)?[kKMG]?/\d+(\.\d+)?\s*(ms|s|m|h|d)$")]
RateField = Annotated[Rate, BeforeValidator(parse_rate, json_schema_input_type=_PerPeriod | Rate)]


class Limits(Frozen):
    """What a tenant may use. What is left out is unlimited."""

    requests: RateField | None = Field(None, description="Requests, as in 600/1m.")
    tokens: RateField | None = Field(None, description="Tokens, input and output together, as in 1M/1m.")
    concurrency: Count | None = Field(None, description="Calls in flight at the same time.")
    budget: Budget | None = Field(None, description="Money.")
    default_output_tokens: Count = Field(
        1024, description="Output tokens reserved for a call that sets no max_tokens; settled to the truth afterwards."
    )

    @property
    def any(self) -> bool:
        return bool(self.requests or self.tokens or self.concurrency or self.budget)


class Key(Frozen):
    id: str = Field(pattern="^[a-z0-9][a-z0-9_]{0,62}$", description="Public part of the key wp-<id>-<secret>.")
    hash: str = Field(pattern="^hmac-sha256:[0-9a-f]{64}$", description="As `warmpath keys hash` prints it.")
    models: tuple[Name, ...] | None = Field(None, description="Models that this key may use; left out: all.")


class Tenant(Frozen):
    name: Name = Field(description="Who is billed.")
    keys: tuple[Key, ...] = Field((), description="Keys kept in this file; others are kept in the storage.")
    models: tuple[Name, ...] | None = Field(None, description="Models that the tenant may use; left out: all.")
    limits: Limits = Field(Limits(), description="What it may use.")
