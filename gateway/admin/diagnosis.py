"""`GET /admin/diagnosis`: the report of `warmpath doctor --json`. `POST /admin/diagnosis/apply`: applies its proposals.

If the policy has `diagnosis.content` on, the report contains the few words around each break, but nothing else of a
prompt.

Applying has two steps. A request without `file` returns the change of the policy file as a diff, and the digest of the
file. The same request with that digest as `file` writes the change, unless the file has changed since, and reloads the
policy. So what is written is what was reviewed. The diff has no lines around the changed ones, which could contain
hashes of keys.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import may_see_money
from gateway.admin.forms import read_form
from gateway.core.errors import BadRequest, Conflict, Overloaded
from gateway.diagnosis import read_summaries, report, report_json
from gateway.endpoints.replies import json_reply
from gateway.policy.edit import PolicyEdit, PolicyEditError, edit_policy, exception_fields
from gateway.policy.fields import Name, Names, parse_duration
from gateway.policy.file import PolicyError, PolicyHolder
from gateway.policy.traffic import CanonicalForm

MAX_QUEUED = 4  # requests that wait for the summaries; further ones are rejected
RETRY_SECONDS = 5.0
MAX_EXCEPTIONS = 20  # of one request


class _ProposedException(CanonicalForm):
    """An exception as the report proposes it, always for one tenant and some models."""

    tenant: Name = Field(description="Tenant of the exception.")
    model: Names = Field(min_length=1, description="Models of the exception.")


class _Apply(BaseModel):
    model_config = ConfigDict(extra="forbid")

    exceptions: tuple[_ProposedException, ...] = Field(
        min_length=1, max_length=MAX_EXCEPTIONS, description="Exceptions to add, as the report proposes them."
    )
    file: str | None = None  # the digest that the preview returned


class DiagnosisEndpoint:
    """Reads the summaries in `folder` in a thread, for one request at a time. Changes of the policy file, too."""

    def __init__(self, policies: PolicyHolder, folder: Path) -> None:
        self._policies = policies
        self._folder = folder
        self._reading = asyncio.Lock()
        self._queued = 0
        self._applying = asyncio.Lock()

    def routes(self) -> list[Route]:
        """The routes, to be mounted behind the admin key."""
        return [
            Route("/admin/diagnosis", self._show),
            Route("/admin/diagnosis/apply", self._apply, methods=["POST"]),
        ]

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
        if not may_see_money(request):
            found["findings"] = [{**each, "lost_cost": {}} for each in found["findings"]]
            found["proposals"] = [{**each, "saved_cost": {}} for each in found["proposals"]]
        return json_reply(200, {**found, "enabled": self._policies.current.diagnosis.sample > 0})

    def _report(self, earliest: str) -> dict[str, Any]:
        rows = (row for row in read_summaries(self._folder) if row.time >= earliest)
        return report_json(report(rows, self._policies.current))

    async def _apply(self, request: Request) -> Response:
        form = await read_form(request, _Apply)
        exceptions = [
            exception_fields(each.tenant, each.model, each.level, each.opt_in, each.template_date)
            for each in form.exceptions
        ]
        async with self._applying:
            try:
                edit = await asyncio.to_thread(
                    edit_policy, self._policies.path, exceptions, checks=self._policies.checks
                )
                if form.file is not None:
                    await self._write(edit, form.file)
            except PolicyError as error:
                raise BadRequest(f"the policy is not changed, since it would not be valid: {error}") from None
            except PolicyEditError as error:
                raise Conflict(str(error)) from None
        return json_reply(
            200,
            {
                "applied": form.file is not None,
                "path": str(edit.path),
                "file": edit.digest,
                "diff": edit.diff(context_lines=0),
                "policy": edit.policy.hash,
            },
        )

    async def _write(self, edit: PolicyEdit, reviewed: str) -> None:
        """Write the change of the file that was reviewed, and reload the policy."""
        if edit.digest != reviewed:
            raise PolicyEditError(f"{edit.path} has changed since the change was reviewed; review it again")
        await asyncio.to_thread(edit.write)
        if not await self._policies.reload():
            raise PolicyEditError(f"the change was written but is not in force: {self._policies.last_error}")


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
