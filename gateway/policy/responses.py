"""Responses that are kept: whether, how long, and how large one may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.policy.fields import Count, Frozen, Seconds, parse_duration


def _how_long(value: Any) -> Any:
    """One message for the whole choice, and not one for each of its halves."""
    if value == "off":
        return value
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError("should be off, or a duration, as in 30d") from None


class Responses(Frozen):
    """What /v1/responses keeps: prompts and answers, in plain, in the storage."""

    keep: Annotated[Literal["off"] | Seconds, BeforeValidator(_how_long)] = Field(
        "off", description="How long a response can be continued and asked for. off: nothing is kept."
    )
    max_response_bytes: Count = Field(
        4_000_000, description="A response that is longer, with its input, is answered and not kept."
    )
    max_stored_bytes: Count = Field(
        1_000_000_000, description="Of one tenant's responses together; beyond it the oldest make room."
    )
