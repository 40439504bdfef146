"""The `x-ratelimit-*` headers, as OpenAI sends them. Durations are in the format of Go, as in `1m30s`."""

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
    """Those of a call's limits that one group of headers reports."""

    kind: HeaderKind
    at: tuple[int, ...]  # their indices, the narrowest scope first; never empty


def header_groups(kinds: Sequence[HeaderKind | None]) -> tuple[HeaderGroup, ...]:
    """Group a call's limits by the headers that report them. `None` stands for a limit that no header reports."""
    found: dict[HeaderKind, list[int]] = {}
    for index, kind in enumerate(kinds):
        if kind is not None:
            found.setdefault(kind, []).append(index)
    return tuple(HeaderGroup(kind, tuple(reversed(at))) for kind, at in found.items())


def tightest_headers(groups: Sequence[HeaderGroup], charges: Sequence[Any], remaining: Sequence[int]) -> dict[str, str]:
    """The headers of an admitted call. If a group has several limits, they report the one with the least left."""
    headers: dict[str, str] = {}
    for kind, at in groups:
        index = min(at, key=remaining.__getitem__) if len(at) > 1 else at[0]
        _add(headers, kind, charges[index], remaining[index])
    return headers


def ratelimit_headers(kind: HeaderKind, charge: RateCharge, remaining: int) -> dict[str, str]:
    """The headers that report one limit."""
    headers: dict[str, str] = {}
    _add(headers, kind, charge, remaining)
    return headers


def _add(headers: dict[str, str], kind: HeaderKind, charge: RateCharge, remaining: int) -> None:
    """`reset` is the time until the limit is whole again, if no request comes meanwhile."""
    limit, rest, reset = _NAMES[kind]
    remaining = min(remaining, charge.limit)  # a large limit's bucket tolerates some tokens more
    headers[limit] = str(charge.limit)
    headers[rest] = str(remaining)
    headers[reset] = go_duration((charge.limit - remaining) * charge.period_seconds / charge.limit)
