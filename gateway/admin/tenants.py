"""`/admin/tenants`: lists, creates, changes and deletes tenants over HTTP, as `warmpath tenants` does."""

from __future__ import annotations

from typing import Any

from pydantic import RootModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import check_tenant, organisation_of
from gateway.admin.forms import read_form
from gateway.auth.tenants import TenantRegistry
from gateway.core.errors import Forbidden
from gateway.core.numbers import whole_number
from gateway.endpoints.replies import json_reply

DEFAULT_LIMIT = 100
LIMIT_MAX = 1000


class _Fields(RootModel[dict[str, Any]]):
    """The fields of a tenant, as in the policy. The registry checks them."""


def tenant_routes(registry: TenantRegistry) -> list[Route]:
    """The routes, to be mounted behind the admin key."""

    async def listed(request: Request) -> Response:
        """Lists tenants by name, from the one after `after`. `parent` selects the children of one tenant."""
        query = request.query_params
        limit = whole_number(query.get("limit", str(DEFAULT_LIMIT)), "limit", minimum=1, maximum=LIMIT_MAX)
        await registry.refresh()
        organisation = organisation_of(request)
        found: list[dict[str, Any]] = []
        for name in registry.names():
            if name <= query.get("after", ""):
                continue
            if organisation is not None and not registry.belongs_to(name, organisation):
                continue
            tenant = registry.get(name)
            if query.get("parent") in (None, tenant["parent"]):
                found.append(tenant)
            if len(found) > limit:
                break
        return json_reply(200, {"object": "list", "data": found[:limit], "has_more": len(found) > limit})

    async def create(request: Request) -> Response:
        fields = (await read_form(request, _Fields)).root
        await registry.refresh()
        check_parent(request, fields.get("parent"))
        return json_reply(201, await registry.create(fields))

    async def one(request: Request) -> Response:
        await registry.refresh()
        check_tenant(request, registry, request.path_params["name"])
        return json_reply(200, registry.get(request.path_params["name"]))

    async def change(request: Request) -> Response:
        fields = (await read_form(request, _Fields)).root
        await registry.refresh()
        check_tenant(request, registry, request.path_params["name"], below=True)
        if "parent" in fields:
            check_parent(request, fields["parent"])
        return json_reply(200, await registry.change(request.path_params["name"], fields))

    async def delete(request: Request) -> Response:
        await registry.refresh()
        check_tenant(request, registry, request.path_params["name"], below=True)
        return json_reply(200, await registry.delete(request.path_params["name"]))

    def check_parent(request: Request, parent: Any) -> None:
        """Raise an error if a key that is restricted to an organisation puts a tenant outside of it."""
        if organisation_of(request) is None:
            return
        if not isinstance(parent, str):
            raise Forbidden("this key may create tenants only below its organisation: set parent")
        check_tenant(request, registry, parent)

    return [
        Route("/admin/tenants", listed, methods=["GET"]),
        Route("/admin/tenants", create, methods=["POST"]),
        Route("/admin/tenants/{name:path}", one, methods=["GET"]),
        Route("/admin/tenants/{name:path}", change, methods=["PATCH"]),
        Route("/admin/tenants/{name:path}", delete, methods=["DELETE"]),
    ]
