"""`GET /admin/history`: what happened in the last hour or week, from the rings that the gateway keeps on disk.

Rates and times are computed here from the sums of each step, so that the page only draws them. `last_minute`, `summary`
and `by`, which has a summary for each class, model and deployment, are computed from the sums of all their steps; a
quantile of quantiles would be wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import may_see_money
from gateway.core.errors import BadRequest, Overloaded
from gateway.endpoints.replies import json_reply
from gateway.telemetry.call_sums import Sums, quantile_ms
from gateway.telemetry.history import COARSE, FINE, Point, Ring, merged, read_history

MAX_QUEUED = 8  # requests that wait for the files; further ones are rejected
RETRY_SECONDS = 2.0
SMOOTHED_SECONDS = 60  # times and hit rates are those of the last minute at each point; a step of 10 s has few calls
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class _Span(NamedTuple):
    seconds: int
    ring: Ring


SPANS = {
    "15m": _Span(900, FINE),
    "1h": _Span(3600, FINE),
    "6h": _Span(6 * 3600, COARSE),
    "24h": _Span(86_400, COARSE),
    "7d": _Span(7 * 86_400, COARSE),
}
_GROUPS = {"class": "classes", "model": "models", "deployment": "deployments"}


class _Group(NamedTuple):
    """Whose calls are shown: those of one class, model or deployment, or all (`by` is empty)."""

    by: str
    name: str

    def sums(self, point: Point) -> Sums:
        if not self.by:
            return point.sums.total
        groups: dict[str, Sums] = getattr(point.sums, _GROUPS[self.by])
        return groups.get(self.name) or Sums()

    def queued(self, point: Point) -> int | None:
        """Queued calls; unknown for a model or deployment, since calls queue by class."""
        if self.by == "class":
            return point.load.queued.get(self.name, 0)
        return None if self.by else sum(point.load.queued.values())

    def in_flight(self, point: Point) -> int | None:
        if self.by == "deployment":
            return point.load.deployments.get(self.name, 0)
        return None if self.by else point.load.in_flight


class HistoryEndpoint:
    """Reads the files in a thread, for one request at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading = asyncio.Lock()
        self._queued = 0

    def routes(self) -> list[Route]:
        """The routes, to be mounted behind the admin key."""
        return [Route("/admin/history", self._show)]

    async def _show(self, request: Request) -> Response:
        name = request.query_params.get("span", "1h")
        span = SPANS.get(name)
        if span is None:
            raise BadRequest(f"span: {name!r} is not one of {', '.join(SPANS)}", param="span")
        group = _group_of(request)
        if self._queued >= MAX_QUEUED:
            raise Overloaded("too many requests wait for the history", retry_after_seconds=RETRY_SECONDS)
        self._queued += 1
        try:
            async with self._reading:
                content = await asyncio.to_thread(self._read, name, span, group, time.time())
        finally:
            self._queued -= 1
        return json_reply(200, content if may_see_money(request) else _without_costs(content))

    def _read(self, name: str, span: _Span, group: _Group, now: float) -> dict[str, Any]:
        points = read_history(self._folder, span.ring, now - span.seconds, now)
        minute = points if span.ring is FINE else read_history(self._folder, FINE, now - 120, now)
        last = minute[-(SMOOTHED_SECONDS // FINE.step_seconds) :]
        last = [point for point in last if point.at > now - 2 * SMOOTHED_SECONDS]
        whole = merged(points)
        return {
            "object": "history",
            "span": name,
            "step_seconds": span.ring.step_seconds,
            "from": now - span.seconds,
            "to": now,
            "points": [
                _entry(points[i], group, _window(points, i, span.ring.step_seconds)) for i in range(len(points))
            ],
            "last_minute": _entry(merged(last), group) if last else None,
            "summary": _entry(whole, group) if points else None,
            "by": {
                by: {name: _entry(whole, _Group(by, name)) for name in sorted(getattr(whole.sums, groups))}
                for by, groups in _GROUPS.items()
            },
        }


def _without_costs(content: dict[str, Any]) -> dict[str, Any]:
    entries = [*content["points"], content["last_minute"], content["summary"]]
    entries += [entry for group in content["by"].values() for entry in group.values()]
    for entry in filter(None, entries):
        entry["cost"] = {}
    return content


def _group_of(request: Request) -> _Group:
    """Parse the filter. Raises `BadRequest` if there are several, since the sums are not kept by combinations."""
    given = [_Group(by, name) for by in _GROUPS if (name := request.query_params.get(by))]
    if len(given) > 1:
        raise BadRequest(f"{given[1].by}: only one of {', '.join(_GROUPS)} can be given", param=given[1].by)
    return given[0] if given else _Group("", "")


def _window(points: Sequence[Point], last: int, step_seconds: int) -> list[Point]:
    """The points whose calls determine the times and hit rates at the point with the index `last`."""
    since = points[last].at - SMOOTHED_SECONDS
    first = max(0, last + 1 - SMOOTHED_SECONDS // step_seconds)
    return [point for point in points[first:last] if point.at > since] + [points[last]]


def _entry(point: Point, group: _Group, window: Sequence[Point] = ()) -> dict[str, Any]:
    """A point as JSON. Times and hit rates are those of `window`, by default of the point itself."""
    sums = group.sums(point)
    seen = sums
    if len(window) > 1:
        seen = Sums()
        for each in window:
            seen.add(group.sums(each))
    return {
        "at": point.at,
        "seconds": round(point.seconds, 3),
        "results": sums.results,
        "errors": sums.errors,
        "ttft_ms": {name: _rounded(quantile_ms(q, seen.ttft)) for name, q in QUANTILES.items()},
        "hit_rate": _rounded(seen.cached_tokens / seen.prompt_tokens) if seen.prompt_tokens else None,
        "prompt_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "output_tokens": sums.output_tokens,
        "cost": {currency: nanos / 1e9 for currency, nanos in sums.cost.items()},
        "queued": group.queued(point),
        "in_flight": group.in_flight(point),
        "storage_timeouts": point.storage_timeouts,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
