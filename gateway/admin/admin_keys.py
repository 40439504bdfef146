"""`/admin/admin-keys`, keys of the admin API with roles; `/admin/me` and `/admin/audit`, who acts and what was done."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import ACTOR
from gateway.admin.forms import read_form
from gateway.auth.admin_keys import Actor, AdminKeys, public_form
from gateway.auth.tenants import TenantRegistry
from gateway.billing.audit import read_audit
from gateway.billing.ledger.chain import RowError
from gateway.core.errors import InternalError
from gateway.core.numbers import whole_number
from gateway.endpoints.replies import json_reply
from gateway.policy.fields import Name, Seconds
from gateway.policy.sign_in import Role

SHOWN, SHOWN_MAX = 100, 1_000  # acts


class _Create(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    role: Role
    organisation: Name | None = None
    expires: Seconds | None = None


def admin_key_routes(keys: AdminKeys, tenants: TenantRegistry, audit: Path) -> list[Route]:
    """The routes, to be mounted behind the admin key. `audit` is the folder of the audit log."""

    async def me(request: Request) -> Response:
        actor: Actor = request.scope[ACTOR]
        return json_reply(200, {"name": actor.name, "role": actor.role, "organisation": actor.organisation})

    async def create(request: Request) -> Response:
        form = await read_form(request, _Create)
        if form.organisation is not None:
            await tenants.refresh()
            tenants.get(form.organisation)
        key, record = await keys.create(form.name, form.role, organisation=form.organisation, life_seconds=form.expires)
        return json_reply(201, {"key": key, **public_form(record)})

    async def listed(_: Request) -> Response:
        return json_reply(200, {"object": "list", "data": [public_form(each) for each in await keys.all()]})

    async def revoke(request: Request) -> Response:
        return json_reply(200, {**public_form(await keys.revoke(request.path_params["key_id"])), "state": "revoked"})

    async def acts(request: Request) -> Response:
        """Lists the last acts that this machine's gateways and commands have recorded, the latest first."""
        shown = whole_number(request.query_params.get("limit", str(SHOWN)), "limit", minimum=1, maximum=SHOWN_MAX)
        try:
            found = await asyncio.to_thread(read_audit, audit)
        except RowError as error:
            raise InternalError(f"the audit log was changed: {error}") from None
        latest = found[: -shown - 1 : -1]
        return json_reply(200, {"object": "list", "data": [each.public_form() for each in latest]})

    return [
        Route("/admin/me", me, methods=["GET"]),
        Route("/admin/admin-keys", listed, methods=["GET"]),
        Route("/admin/admin-keys", create, methods=["POST"]),
        Route("/admin/admin-keys/{key_id}", revoke, methods=["DELETE"]),
        Route("/admin/audit", acts, methods=["GET"]),
    ]
