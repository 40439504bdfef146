"""Headers of a reply by Anthropic's names: the request's id, and what is left of limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from gateway.core.times import parse_go_duration

_LIMITS = tuple(
    (tuple(f"x-ratelimit-{figure}-{what}" for figure in ("limit", "remaining", "reset")), f"anthropic-ratelimit-{what}")
    for what in ("requests", "tokens")
)


def headers_of(named: Mapping[str, str], request_id: str, now: float) -> dict[str, str]:
    """To those that are `named` already. `now` is in seconds since the epoch: where OpenAI says how long it takes until
    a limit is whole again, Anthropic says when it will be.
    """
    told = {"request-id": request_id}
    for (limit, remaining, reset), name in _LIMITS:
        if limit in named:
            whole_again = datetime.fromtimestamp(math.ceil(now + parse_go_duration(named[reset])), UTC)
            told[f"{name}-limit"] = named[limit]
            told[f"{name}-remaining"] = named[remaining]
            told[f"{name}-reset"] = whole_again.strftime("%Y-%m-%dT%H:%M:%SZ")
    return told
