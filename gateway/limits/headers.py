"""The `x-ratelimit-*` headers as OpenAI sends them, durations as Go prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gateway.storage.base import RateCharge

Shown = Literal["requests", "tokens"]

_NAMES = {
    what: (f"x-ratelimit-limit-{what}", f"x-ratelimit-remaining-{what}", f"x-ratelimit-reset-{what}")
    for what in ("requests", "tokens")
}


def tightest_headers(
    shown: Sequence[tuple[Shown, int]], charges: Sequence[Any], remaining: Sequence[int]
) -> dict[str, str]:
    """Of several limits of one sort, a client is told of the one that has the least left. `shown`: the sort of each
    that clients are told of, and where its charge stands."""
    headers: dict[str, str] = {}
    told: dict[Shown, int] = {}
    for sort, index in shown:
        left = remaining[index]
        if told.setdefault(sort, left) >= left:
            told[sort] = left
            headers.update(ratelimit_headers(sort, charges[index], left))
    return headers


def ratelimit_headers(what: Shown, charge: RateCharge, remaining: int) -> dict[str, str]:
    """`reset` is when the limit is whole again if nobody asks meanwhile."""
    limit, rest, reset = _NAMES[what]
    reset_seconds = (charge.limit - remaining) * charge.period_seconds / charge.limit
    return {limit: str(charge.limit), rest: str(remaining), reset: go_duration(reset_seconds)}


def go_duration(seconds: float) -> str:
    """`12ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`: to the millisecond."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    whole, milliseconds = divmod(milliseconds, 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    text = f"{second}.{milliseconds:03}".rstrip("0").rstrip(".") + "s" if milliseconds else f"{second}s"
    if hours:
        return f"{hours}h{minute}m{text}"
    return f"{minute}m{text}" if minute else text
