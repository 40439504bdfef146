"""Policy model of idempotency keys: how long answers can be replayed, and what happens to a request in flight."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.policy.fields import Count, Frozen, Seconds, parse_off_or_duration


class IdempotencyKeys(Frozen):
    """Requests with an `Idempotency-Key` header. The storage then has their answers, unencrypted."""

    keep: Annotated[Literal["off"] | Seconds, BeforeValidator(parse_off_or_duration)] = Field(
        86_400.0, description="How long a key is bound to its request and its answer. off: the header is ignored."
    )
    in_flight: Literal["join", "reject"] = Field(
        "join",
        description="What happens to a request whose key is in flight. join: it gets the same answer. reject: it gets "
        "a 409, unless its SDK marks it as a retry.",
    )
    finish: bool = Field(
        True, description="Finish an answer whose client has disconnected, so that its retry gets the answer."
    )
    max_answer_bytes: Count = Field(4_000_000, description="Longer answers are not stored: a retry runs again.")
    max_stored_bytes: Count = Field(
        100_000_000, description="Maximum bytes of one tenant's answers. Beyond it, the oldest are deleted."
    )
