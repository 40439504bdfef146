"""Policy model of webhooks, which warn when budgets are nearly spent (`gateway.limits.budget_warnings`)."""

from __future__ import annotations

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
