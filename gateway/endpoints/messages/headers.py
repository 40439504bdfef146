"""Reply headers of Anthropic's API: the request id and the rate limits, under Anthropic's header names."""

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
    """Return the headers to add to a reply that already has the headers `named`. `now` is in seconds since the epoch.

    OpenAI's reset header is a duration. Anthropic's reset header is the time at which the limit is fully restored.
    """
    headers = {"request-id": request_id}
    for (limit, remaining, reset), name in _LIMITS:
        if limit in named:
            reset_at = datetime.fromtimestamp(math.ceil(now + parse_go_duration(named[reset])), UTC)
            headers[f"{name}-limit"] = named[limit]
            headers[f"{name}-remaining"] = named[remaining]
            headers[f"{name}-reset"] = reset_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers
