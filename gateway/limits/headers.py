"""Rate limit headers (`x-ratelimit-*`) in OpenAI's format. Durations are in Go's notation, such as `1m30s`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gateway.core.times import go_duration
from gateway.storage.base import RateCharge

HeaderKind = Literal["requests", "tokens"]

_NAMES = {
    kind: (f"x-ratelimit-limit-{kind}", f"x-ratelimit-remaining-{kind}", f"x-ratelimit-reset-{kind}")
    for kind in ("requests", "tokens")
}


class HeaderGroup(NamedTuple):
    """The limits of a call that are reported by the same group of headers."""

    kind: HeaderKind
    at: tuple[int, ...]  # indices of these limits, the narrowest scope first; never empty


def header_groups(kinds: Sequence[HeaderKind | None]) -> tuple[HeaderGroup, ...]:
    """Group a call's limits by the headers that report them. `None` stands for a limit that no header reports."""
    found: dict[HeaderKind, list[int]] = {}
    for index, kind in enumerate(kinds):
        if kind is not None:
            found.setdefault(kind, []).append(index)
    return tuple(HeaderGroup(kind, tuple(reversed(at))) for kind, at in found.items())


def tightest_headers(groups: Sequence[HeaderGroup], charges: Sequence[Any], remaining: Sequence[int]) -> dict[str, str]:
    """Return the headers of an admitted call. For each group, they report the limit with the least left."""
    headers: dict[str, str] = {}
    for kind, at in groups:
        index = min(at, key=remaining.__getitem__) if len(at) > 1 else at[0]
        _add(headers, kind, charges[index], remaining[index])
    return headers


def ratelimit_headers(kind: HeaderKind, charge: RateCharge, remaining: int) -> dict[str, str]:
    """Return the headers that report one limit."""
    headers: dict[str, str] = {}
    _add(headers, kind, charge, remaining)
    return headers


def _add(headers: dict[str, str], kind: HeaderKind, charge: RateCharge, remaining: int) -> None:
    """Add the headers of one limit. `reset` is the time until the full limit is available, without other requests."""
    limit, rest, reset = _NAMES[kind]
    if remaining > charge.limit:  # the bucket of a large limit may contain slightly more than the limit
        remaining = charge.limit
    headers[limit] = str(charge.limit)
    headers[rest] = str(remaining)
    headers[reset] = go_duration((charge.limit - remaining) * charge.period_seconds / charge.limit)
