"""`GET /v1/organization/usage/...` and `costs`, compatible with OpenAI's usage API.

The usage is that of completions, embeddings, moderations, images and transcriptions.

OpenAI's terms map as follows: a project is a tenant, a user is the end user that requests name, a line item is the
requested model, and batch is the latency class `batch`. Days, hours and minutes are UTC, and a call belongs to the one
in which it ended. Each currency is a separate result.

DuckDB reads the ledger in a thread, for one request at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import organisation_of
from gateway.auth.tenants import TenantRegistry
from gateway.billing.ledger.reader import (
    Period,
    UnitLine,
    UnreadableLedger,
    UnreadableRow,
    UsageLine,
    sum_unit,
    summarise,
)
from gateway.billing.ledger.unreadable import warn_of_unreadable
from gateway.core.errors import BadRequest, InternalError, Overloaded
from gateway.core.numbers import whole_number
from gateway.endpoints.replies import json_reply

MAX_QUEUED = 8  # requests that wait for the ledger; further ones are rejected
RETRY_SECONDS = 5.0

log = logging.getLogger("warmpath")


TIME_MAX = 2**33  # seconds since the epoch: in the year 2242


class _Width(NamedTuple):
    seconds: int
    dimension: str  # the ledger reader's name for it
    limit: int  # default number of buckets on a page
    limit_max: int


_WIDTHS = {
    "1m": _Width(60, "minute", 60, 1440),
    "1h": _Width(3600, "hour", 24, 168),
    "1d": _Width(86_400, "day", 7, 31),
}
_COST_WIDTHS = {"1d": _Width(86_400, "day", 7, 180)}

# OpenAI's parameter -> the ledger's dimension
_USAGE_GROUPS = {
    "project_id": "tenant", "user_id": "user", "api_key_id": "key", "model": "model", "batch": "batch",
    "service_tier": "tier",
}  # fmt: skip
_MODEL_GROUPS = {"project_id": "tenant", "user_id": "user", "api_key_id": "key", "model": "model"}
_COST_GROUPS = {"project_id": "tenant", "line_item": "model", "api_key_id": "key"}
_FILTERS = {"project_ids": "tenant", "user_ids": "user", "api_key_ids": "key", "models": "model"}
_COMPLETIONS = ("chat/completions", "completions", "responses", "messages")
_IMAGES = ("images/generations", "images/edits", "images/variations")
_TRANSCRIPTIONS = ("audio/transcriptions", "audio/translations")

_Line = TypeVar("_Line", UsageLine, UnitLine)


class _Query(NamedTuple):
    """A parsed request. Times are seconds since the epoch."""

    width: _Width
    start: int  # of the first bucket
    end: int
    limit: int
    groups: dict[str, str]
    only: dict[str, list[str]]


def usage_routes(ledger: Path, tenants: TenantRegistry) -> list[Route]:
    """The routes, to be mounted behind the admin key."""
    reports = _Reports(ledger, tenants)
    return [
        Route("/v1/organization/usage/completions", reports.completions),
        Route("/v1/organization/usage/embeddings", reports.embeddings),
        Route("/v1/organization/usage/moderations", reports.moderations),
        Route("/v1/organization/usage/images", reports.images),
        Route("/v1/organization/usage/audio_transcriptions", reports.transcriptions),
        Route("/v1/organization/costs", reports.costs),
    ]


class _Reports:
    def __init__(self, ledger: Path, tenants: TenantRegistry) -> None:
        self._ledger = ledger
        self._tenants = tenants
        self._reading = asyncio.Lock()
        self._queued = 0
        self._set_aside: list[UnreadableRow] = []  # as logged

    async def completions(self, request: Request) -> Response:
        query = self._query(request, _USAGE_GROUPS, _COMPLETIONS)
        return await self._page(query, summarise, lambda line, group: [_completions_result(line, group)])

    async def embeddings(self, request: Request) -> Response:
        query = self._query(request, _MODEL_GROUPS, ("embeddings",))
        return await self._page(query, summarise, lambda line, group: [_input_result("embeddings", line, group)])

    async def moderations(self, request: Request) -> Response:
        query = self._query(request, _MODEL_GROUPS, ("moderations",))
        return await self._page(query, summarise, lambda line, group: [_input_result("moderations", line, group)])

    async def images(self, request: Request) -> Response:
        query = self._query(request, _MODEL_GROUPS, _IMAGES)
        read = partial(sum_unit, unit="image")
        return await self._page(query, read, lambda line, group: [_unit_result("images", "images", line, group)])

    async def transcriptions(self, request: Request) -> Response:
        query = self._query(request, _MODEL_GROUPS, _TRANSCRIPTIONS)
        read, kind = partial(sum_unit, unit="second"), "audio_transcriptions"
        return await self._page(query, read, lambda line, group: [_unit_result(kind, "seconds", line, group)])

    async def costs(self, request: Request) -> Response:
        query = _read(request, _COST_WIDTHS, _COST_GROUPS)
        self._restrict(request, query)
        return await self._page(query, summarise, _cost_results)

    def _query(self, request: Request, groups: Mapping[str, str], operations: Sequence[str]) -> _Query:
        query = _read(request, _WIDTHS, groups)
        query.only["operation"] = list(operations)
        self._restrict(request, query)
        return query

    def _restrict(self, request: Request, query: _Query) -> None:
        """Leave out other tenants' calls if the actor is restricted to an organisation."""
        organisation = organisation_of(request)
        if organisation is not None:
            own = [name for name in self._tenants.names() if self._tenants.belongs_to(name, organisation)]
            asked = query.only.get("tenant", own)
            query.only["tenant"] = [name for name in own if name in asked]

    async def _page(
        self,
        query: _Query,
        read: Callable[..., list[_Line]],
        results: Callable[[_Line, dict[str, Any]], list[dict[str, Any]]],
    ) -> Response:
        width = query.width.seconds
        starts = range(query.start, query.end, width)
        page = starts[: query.limit]
        found: dict[int, list[dict[str, Any]]] = defaultdict(list)
        if page:
            period = Period(_text(page[0]), _text(page[-1] + width), query.only)
            by = [query.width.dimension, *query.groups.values()]
            for line in await self._lines(read, by, period):
                start = datetime.fromisoformat(str(line.group[query.width.dimension])).replace(tzinfo=UTC)
                found[int(start.timestamp())] += results(line, _group_of(line, query.groups))
        more = len(starts) > len(page)
        buckets = [
            {"object": "bucket", "start_time": start, "end_time": start + width, "results": found[start]}
            for start in page
        ]
        next_page = f"page_{page[-1] + width}" if more else None
        return json_reply(200, {"object": "page", "data": buckets, "has_more": more, "next_page": next_page})

    async def _lines(self, read: Callable[..., list[_Line]], by: Sequence[str], period: Period) -> list[_Line]:
        if self._queued > MAX_QUEUED:
            raise Overloaded("too many requests wait for the ledger", retry_after_seconds=RETRY_SECONDS)
        self._queued += 1
        try:
            async with self._reading:
                set_aside: list[UnreadableRow] = []
                lines = await asyncio.to_thread(
                    read, self._ledger, by=by, period=period, threads=1, set_aside=set_aside
                )
                self._note(set_aside)
                return lines
        except UnreadableLedger as error:
            log.error("cannot read the ledger: %s", error)
            raise InternalError("cannot read the ledger; `warmpath usage verify` finds the row") from error
        finally:
            self._queued -= 1

    def _note(self, set_aside: list[UnreadableRow]) -> None:
        """Log which rows are set aside, once as long as they are the same."""
        if set_aside != self._set_aside:
            self._set_aside = set_aside
            warn_of_unreadable(set_aside, log)


def _completions_result(line: UsageLine, group: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(_USAGE_GROUPS)
    return {
        "object": "organization.usage.completions.result",
        # OpenAI's `input_tokens` includes cached tokens; ours are by kind.
        "input_tokens": line.input_uncached + line.cache_read + line.cache_write,
        "input_uncached_tokens": line.input_uncached,
        "input_cached_tokens": line.cache_read,
        "input_cache_write_tokens": line.cache_write,
        "input_text_tokens": line.input_uncached - line.audio_input,
        "output_tokens": line.output,
        "output_text_tokens": line.output - line.audio_output,
        "input_audio_tokens": line.audio_input,
        "output_audio_tokens": line.audio_output,
        "num_model_requests": line.requests - line.cache_hits,  # cached answers are not model requests
        **names,
        **group,
    }


def _input_result(kind: str, line: UsageLine, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": f"organization.usage.{kind}.result",
        "input_tokens": line.input_uncached + line.cache_read + line.cache_write,
        "num_model_requests": line.requests - line.cache_hits,
        **dict.fromkeys(_MODEL_GROUPS),
        **group,
    }


def _unit_result(kind: str, unit: str, line: UnitLine, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": f"organization.usage.{kind}.result",
        unit: math.ceil(line.quantity),
        "num_model_requests": line.requests,
        **dict.fromkeys(_MODEL_GROUPS),
        **group,
    }


def _cost_results(line: UsageLine, group: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "object": "organization.costs.result",
            "amount": {"value": float(amount), "currency": currency.lower()},
            **dict.fromkeys(_COST_GROUPS),
            **group,
        }
        for currency, amount in line.cost.items()
    ]


def _group_of(line: UsageLine | UnitLine, groups: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: line.group[dimension] for name, dimension in groups.items()}
    if "batch" in values:
        values["batch"] = values["batch"] == "true"
    return values


def _read(request: Request, widths: Mapping[str, _Width], groups: Mapping[str, str]) -> _Query:
    """Parse the query string. Raises `BadRequest`, which names the parameter."""
    width = widths.get(name := request.query_params.get("bucket_width", "1d"))
    if width is None:
        raise BadRequest(f"bucket_width: {name!r} is not one of {', '.join(widths)}", param="bucket_width")
    asked = request.query_params.get("limit", str(width.limit))
    limit = whole_number(asked, "limit", minimum=1, maximum=width.limit_max)
    start, end = _time(request, "start_time", None), _time(request, "end_time", int(time.time()))
    if page := request.query_params.get("page"):
        if not page.startswith("page_"):
            raise BadRequest("page: must be the `next_page` of an earlier reply", param="page")
        start = whole_number(page[5:], "page", minimum=0, maximum=TIME_MAX)
    chosen = {}
    for group in _list(request, "group_by"):
        if group not in groups:
            raise BadRequest(f"group_by: {group!r} is not one of {', '.join(groups)}", param="group_by")
        chosen[group] = groups[group]
    only = {dimension: values for name, dimension in _FILTERS.items() if (values := _list(request, name))}
    if batch := request.query_params.get("batch"):
        only["batch"] = [batch.lower()]
    return _Query(width, start - start % width.seconds, end, limit, chosen, only)


def _time(request: Request, name: str, default: int | None) -> int:
    """Return a time in seconds since the epoch. Raises `BadRequest` if it is missing and has no default."""
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    return whole_number(text or "", name, minimum=0, maximum=TIME_MAX)


def _list(request: Request, name: str) -> list[str]:
    """A list parameter, which clients write as `name=a&name=b` or as `name[]=a&name[]=b`."""
    query = request.query_params
    return [*query.getlist(name), *query.getlist(f"{name}[]")]


def _text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000000Z")
