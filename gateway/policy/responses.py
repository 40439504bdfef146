"""Policy model of stored responses: whether responses are stored, for how long, and how large they may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.policy.fields import Count, Frozen, Seconds, parse_off_or_duration


class Background(Frozen):
    """Responses in the background (`background: true`), which run without their client. They need stored responses."""

    max_open: Count = Field(16, description="Maximum responses of one tenant that are queued or in progress.")
    max_time: Seconds = Field(3600.0, description="Longest time of one response, in the queue and in progress.")
    keep_events: Seconds = Field(600.0, description="How long each event of a stream can be fetched again.")
    max_event_bytes: Count = Field(
        16_000_000, description="Maximum bytes of one tenant's stored events. Beyond it, the oldest are deleted."
    )


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
    background: Background = Field(Background(), description="Bounds of responses in the background.")
