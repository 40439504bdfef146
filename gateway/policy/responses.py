"""Policy model of stored responses: whether responses are stored, for how long, and how large they may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.policy.fields import Count, Frozen, Seconds, parse_off_or_duration


class Responses(Frozen):
    """Stored responses of /v1/responses: prompts and answers, unencrypted, in the storage."""

    keep: Annotated[Literal["off"] | Seconds, BeforeValidator(parse_off_or_duration)] = Field(
        "off", description="How long a response can be continued and retrieved. off: responses are not stored."
    )
    max_response_bytes: Count = Field(
        4_000_000, description="Longer responses, input included, are answered but not stored."
    )
    max_stored_bytes: Count = Field(
        1_000_000_000, description="Maximum bytes of one tenant's stored responses. Beyond it, the oldest are deleted."
    )
