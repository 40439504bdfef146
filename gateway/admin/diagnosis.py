"""`GET /admin/diagnosis`: the report of `warmpath doctor --json`.

If the policy has `diagnosis.content` on, the report contains the few words around each break, but nothing else of a
prompt.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import BadRequest, Overloaded
from gateway.diagnosis import read_summaries, report, report_json
from gateway.endpoints.replies import json_reply
from gateway.policy.fields import parse_duration
from gateway.policy.file import PolicyHolder

MAX_QUEUED = 4  # requests that wait for the summaries; further ones are rejected
RETRY_SECONDS = 5.0


class DiagnosisEndpoint:
    """Reads the summaries in `folder` in a thread, for one request at a time."""

    def __init__(self, policies: PolicyHolder, folder: Path) -> None:
        self._policies = policies
        self._folder = folder
        self._reading = asyncio.Lock()
        self._queued = 0

    def route(self) -> Route:
        """The route, to be mounted behind the admin key."""
        return Route("/admin/diagnosis", self._show)

    async def _show(self, request: Request) -> Response:
        earliest = _earliest(request)
        if self._queued >= MAX_QUEUED:
            raise Overloaded("too many requests wait for the summaries", retry_after_seconds=RETRY_SECONDS)
        self._queued += 1
        try:
            async with self._reading:
                found = await asyncio.to_thread(self._report, earliest)
        finally:
            self._queued -= 1
        return json_reply(200, {**found, "enabled": self._policies.current.diagnosis.sample > 0})

    def _report(self, earliest: str) -> dict[str, Any]:
        return report_json(report(row for row in read_summaries(self._folder) if row.time >= earliest))


def _earliest(request: Request) -> str:
    """The start of the period, in the form that rows have. Raises `BadRequest`, which names the parameter."""
    since = request.query_params.get("since")
    if since is None:
        return ""
    try:
        moment = datetime.now(UTC) - timedelta(seconds=parse_duration(since))
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"since: {error}", param="since") from None
    return moment.isoformat(timespec="milliseconds")
