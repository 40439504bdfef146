"""Projects and their API keys in the form of OpenAI's administration API, for tools that read it.

A project is a tenant, of the policy or of the storage; a disabled one is archived. A key belongs to a service account
of its own name, since the gateway's keys have no human owners. The time at which a tenant was created is not known: it
is 0, as that of a key in the policy. Tenants and keys are changed under `/admin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import check_tenant, organisation_of
from gateway.auth.keyring import Keyring
from gateway.auth.last_uses import LastUses
from gateway.auth.tenants import TenantRegistry
from gateway.core.errors import BadRequest, NotFound
from gateway.core.numbers import whole_number
from gateway.core.times import rfc3339_to_ns
from gateway.endpoints.replies import json_reply

DEFAULT_LIMIT = 20
LIMIT_MAX = 100


class OrganizationApi:
    """Reads tenants and keys. `routes` are to be mounted behind the admin key."""

    def __init__(self, keyring: Keyring, tenants: TenantRegistry, last_uses: LastUses) -> None:
        self._keyring = keyring
        self._tenants = tenants
        self._last_uses = last_uses

    def routes(self) -> list[Route]:
        """The routes. The name of a project may have slashes, so the longer paths come first."""
        return [
            Route("/v1/organization/projects", self._projects),
            Route("/v1/organization/projects/{project_id:path}/api_keys/{key_id}", self._key),
            Route("/v1/organization/projects/{project_id:path}/api_keys", self._keys),
            Route("/v1/organization/projects/{project_id:path}", self._project),
        ]

    async def _projects(self, request: Request) -> Response:
        await self._tenants.refresh()
        organisation = organisation_of(request)
        archived = _flag(request, "include_archived")
        tenants = [
            self._tenants.get(name)
            for name in self._tenants.names()
            if organisation is None or self._tenants.belongs_to(name, organisation)
        ]
        return _page(request, [_project_form(each) for each in tenants if archived or not each["disabled"]])

    async def _project(self, request: Request) -> Response:
        return json_reply(200, _project_form(self._tenants.get(await self._name(request))))

    async def _keys(self, request: Request) -> Response:
        return _page(request, await self._keys_of(await self._name(request)))

    async def _key(self, request: Request) -> Response:
        name, key_id = await self._name(request), request.path_params["key_id"]
        found = next((each for each in await self._keys_of(name) if each["id"] == key_id), None)
        if found is None:
            raise NotFound(f"there is no key {key_id!r} in {name!r}", param="key_id")
        return json_reply(200, found)

    async def _name(self, request: Request) -> str:
        """The tenant that the path names. Raises `NotFound`, also for one of another organisation."""
        name = str(request.path_params["project_id"])
        await self._tenants.refresh()
        check_tenant(request, self._tenants, name)
        self._tenants.get(name)
        return name

    async def _keys_of(self, name: str) -> list[dict[str, Any]]:
        tenant = self._tenants.find(name)
        created = {record.id: rfc3339_to_ns(record.created) // 10**9 for record in await self._keyring.all()
                   if record.tenant == name and not record.revoked}  # fmt: skip
        for key in tenant.keys if tenant is not None else ():
            created.setdefault(key.id, 0)
        used = await self._last_uses.of(list(created))
        return [_key_form(key_id, at, used.get(key_id)) for key_id, at in sorted(created.items())]


def _project_form(tenant: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": tenant["name"],
        "object": "organization.project",
        "name": tenant["name"],
        "created_at": 0,
        "archived_at": 0 if tenant["disabled"] else None,
        "status": "archived" if tenant["disabled"] else "active",
    }


def _key_form(key_id: str, created_at: int, used_ns: int | None) -> dict[str, Any]:
    account = {
        "id": key_id, "object": "organization.project.service_account", "name": key_id, "role": "member",
        "created_at": created_at,
    }  # fmt: skip
    return {
        "object": "organization.project.api_key",
        "redacted_value": f"wp-{key_id}-...",
        "name": key_id,
        "created_at": created_at,
        "last_used_at": None if used_ns is None else used_ns // 10**9,
        "id": key_id,
        "owner": {"type": "service_account", "service_account": account},
    }


def _page(request: Request, found: Sequence[dict[str, Any]]) -> Response:
    """A page of a list sorted by id, from the entry after `after`."""
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    limit = whole_number(text, "limit", minimum=1, maximum=LIMIT_MAX)
    rest = [each for each in found if each["id"] > request.query_params.get("after", "")]
    shown = rest[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_reply(200, {"object": "list", "data": shown, **ends, "has_more": len(rest) > limit})


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise BadRequest(f"{name}: must be true or false", param=name)
    return text == "true"
