"""The `x-ratelimit-*` headers as OpenAI sends them, durations as Go prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gateway.core.times import go_duration
from gateway.storage.base import RateCharge

Sort = Literal["requests", "tokens"]

_NAMES = {
    what: (f"x-ratelimit-limit-{what}", f"x-ratelimit-remaining-{what}", f"x-ratelimit-reset-{what}")
    for what in ("requests", "tokens")
}


class HeaderGroup(NamedTuple):
    """The limits of one sort among all of a call's: where they stand, the narrowest scope first."""

    sort: Sort
    at: tuple[int, ...]  # never empty


def header_groups(sorts: Sequence[Sort | None]) -> tuple[HeaderGroup, ...]:
    """What clients are told of limits of these sorts; None is for those of which they are told nothing."""
    found: dict[Sort, list[int]] = {}
    for index, sort in enumerate(sorts):
        if sort is not None:
            found.setdefault(sort, []).append(index)
    return tuple(HeaderGroup(sort, tuple(reversed(at))) for sort, at in found.items())


def tightest_headers(shown: Sequence[HeaderGroup], charges: Sequence[Any], remaining: Sequence[int]) -> dict[str, str]:
    """Of several limits of one sort, a client is told of the one that has the least left."""
    headers: dict[str, str] = {}
    for sort, at in shown:
        index = min(at, key=remaining.__getitem__) if len(at) > 1 else at[0]
        _tell(headers, sort, charges[index], remaining[index])
    return headers


def ratelimit_headers(what: Sort, charge: RateCharge, remaining: int) -> dict[str, str]:
    headers: dict[str, str] = {}
    _tell(headers, what, charge, remaining)
    return headers


def _tell(headers: dict[str, str], what: Sort, charge: RateCharge, remaining: int) -> None:
    """`reset` is when the limit is whole again if nobody asks meanwhile."""
    limit, rest, reset = _NAMES[what]
    remaining = min(remaining, charge.limit)  # of a large limit, a bucket's tolerance is some tokens
    headers[limit] = str(charge.limit)
    headers[rest] = str(remaining)
    headers[reset] = go_duration((charge.limit - remaining) * charge.period_seconds / charge.limit)
