"""Policy model of webhooks, which warn about budgets: spent shares, forecasts and unusual spend (`gateway.limits`)."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import Field

from gateway.policy.fields import Frozen, Secret, Share


class Webhook(Frozen):
    """A receiver of events, signed by the Standard Webhooks specification."""

    url: Annotated[str, Field(pattern=r"^https?://")] = Field(description="Where events are sent, by POST.")
    secret: Secret = Field(description="Secret of the signature: whsec_ and Base64.")
    budgets_at: Annotated[tuple[Annotated[Share, Field(gt=0)], ...], Field(min_length=1)] = Field(
        (0.5, 0.8, 1.0), description="Spent shares of a budget at which an event is sent, once per period."
    )
    forecast_at: Annotated[Share, Field(gt=0)] | None = Field(
        None,
        description="An event is sent, once per period, if the spend so far forecasts that this share of a budget will "
        "be spent at the end of the period. The first tenth of a period forecasts nothing. null: never.",
    )
    unusual_at: Annotated[float, Field(gt=1, le=1000)] | None = Field(
        4.0,
        description="An event is sent, once per hour, if an hour's spend of a budget is above so many times the usual "
        "spend of that hour of the day and of an average hour. null: never.",
    )
    unusual_min: Annotated[Decimal, Field(ge=0, max_digits=18, decimal_places=9)] = Field(
        Decimal(1), description="The least spend of an hour that is unusual, in the currency of the budget."
    )
