"""Routes for the dashboard: the metrics, the policy in force and the recent calls.

They show no secrets, prompts or answers. Any worker may receive a request; it collects the metrics and calls of all
workers of the gateway (`Workers`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import may_see_money
from gateway.auth.tenants import TenantRegistry
from gateway.core.errors import BadRequest
from gateway.core.numbers import whole_number
from gateway.core.times import rfc3339
from gateway.endpoints.replies import json_reply
from gateway.limits import LIMITS
from gateway.limits.report import has_limits
from gateway.policy.file import PolicyHolder
from gateway.policy.history import previous
from gateway.policy.redacted import policy_diff, redacted_text
from gateway.telemetry import Telemetry
from gateway.telemetry.recent_calls import RECENT_CALLS, RecentCall, RecentCallsQuery, decode_recent_calls

DEFAULT_LIMIT = 100  # calls
MAX_TENANTS_SHOWN = 1000  # in the summary; `/admin/tenants` has all of them
_MONEY = re.compile(rb"(?:# [A-Z]+ )?warmpath_(?:tenant_)?(?:cost|budget|spend)[_ {]")


class Workers(Protocol):
    """Access to all workers of a gateway from the one that answers the request."""

    async def metrics(self, own: bytes, content_type: str) -> bytes:
        """The metrics of all workers as text of this content type, given this worker's own."""

    async def calls(self, query: bytes) -> dict[int, bytes | None]:
        """The recent calls of each worker for an encoded `RecentCallsQuery`; None for a worker without an answer."""


def view_routes(
    policies: PolicyHolder,
    telemetry: Telemetry,
    workers: Workers,
    tenants: TenantRegistry,
    *,
    trace_url: str | None,
    policy_folder: Path,
) -> list[Route]:
    """The routes, to be mounted behind the admin key.

    `trace_url` is the template of links to traces. `policy_folder` has the history of policies.
    """

    async def metrics(request: Request) -> Response:
        own, content_type = telemetry.render_metrics()
        text = await workers.metrics(own, content_type)
        if not may_see_money(request):
            text = without_money(text)
        return Response(text, headers={"content-type": content_type})

    async def policy(_: Request) -> Response:
        return json_reply(200, {**_summary(policies, tenants), "trace_url": trace_url})

    async def document(_: Request) -> Response:
        return json_reply(
            200, {**_summary(policies, tenants), **await asyncio.to_thread(_document, policies, policy_folder)}
        )

    async def calls(request: Request) -> Response:
        query = RecentCallsQuery(_limit(request), request.query_params.get("class") or None, _flag(request, "troubled"))
        replies = await workers.calls(msgspec.json.encode(query))
        return json_reply(200, _last_calls(replies, query.limit, with_costs=may_see_money(request)))

    return [
        Route("/admin/metrics", metrics),
        Route("/admin/policy", policy),
        Route("/admin/policy/document", document),
        Route("/admin/calls", calls),
    ]


def without_money(metrics: bytes) -> bytes:
    """The lines of metrics without those about costs and budgets, for roles that may not see money."""
    return b"".join(line for line in metrics.splitlines(keepends=True) if not _MONEY.match(line))


def _document(policies: PolicyHolder, folder: Path) -> dict[str, Any]:
    """The policy in force as text, and how it differs from the one that was in force before."""
    policy = policies.current
    before = previous(policy.hash, folder)
    return {
        "hash": policy.hash,
        "text": redacted_text(policy),
        "previous": None if before is None else before.hash,
        "diff": [] if before is None else policy_diff(before, policy),
    }


def _summary(policies: PolicyHolder, tenants: TenantRegistry) -> dict[str, Any]:
    """The parts of the policy that the dashboard needs: names, and what refers to what."""
    policy = policies.current
    return {
        "hash": policy.hash,
        "path": str(policies.path),
        "loaded_at": f"{rfc3339(policies.loaded_ns)[:23]}Z",  # to the millisecond
        "last_error": None if policies.last_error is None else str(policies.last_error),
        "deployments": [
            {
                "name": deployment.name,
                "provider": deployment.provider,
                "base_url": deployment.shown_url,
                "model": deployment.model,
                "role": deployment.role,
                "max_concurrency": deployment.max_concurrency,
            }
            for deployment in policy.deployments
        ],
        "models": [
            {
                "name": model.name,
                "aliases": model.aliases,
                "deployments": model.deployments,
                "fallbacks": model.fallbacks,
            }
            for model in policy.models
        ],
        "classes": list(policy.classes),
        "tenants": [
            {"name": tenant.name, "has_limits": has_limits(tenant, LIMITS)}
            for tenant in islice(tenants.all(), MAX_TENANTS_SHOWN)
        ],
    }


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    return whole_number(text, "limit", minimum=1, maximum=RECENT_CALLS)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise BadRequest(f"{name}: must be true or false", param=name)
    return text == "true"


def _last_calls(replies: Mapping[int, bytes | None], limit: int, *, with_costs: bool) -> dict[str, Any]:
    """The calls that ended last over all workers, at most `limit`, latest start first."""
    found = list[RecentCall]()
    answered = 0
    for content in replies.values():
        if content is not None:
            try:
                found += decode_recent_calls(content)
            except msgspec.MsgspecError:  # a worker of another version: as if it had not answered
                continue
            answered += 1
    found.sort(key=lambda call: call.ended_ns, reverse=True)
    shown = sorted(found[:limit], key=lambda call: call.started_ns, reverse=True)
    return {
        "object": "list",
        "workers": {"asked": len(replies), "answered": answered},
        "data": [
            orjson.Fragment(bytes(call.json)) if with_costs else {**orjson.loads(bytes(call.json)), "cost": None}
            for call in shown
        ],
    }
