"""What each role may do at the admin API: the one table of requests and permissions.

A request that is not in the table is for owners. A key that is restricted to an organisation may use only the requests
with `scoped`; their handlers ask `organisation_of` and refuse or leave out what does not belong to it.

    viewer    reads everything but money
    billing   reads what viewers read, and money
    admin     reads and changes everything but admin keys and the audit log
    owner     everything
"""

from __future__ import annotations

import re
from typing import NamedTuple

from starlette.requests import Request

from gateway.auth.admin_keys import Actor
from gateway.auth.tenants import TenantRegistry
from gateway.core.errors import Forbidden, NotFound
from gateway.policy.sign_in import Role

ACTOR = "warmpath.actor"  # the key of the request's actor in the ASGI scope


class Permission(NamedTuple):
    """Who may send a request: the roles, and whether a key that is restricted to an organisation may."""

    roles: frozenset[Role]
    scoped: bool = False


_READ: frozenset[Role] = frozenset({"viewer", "billing", "admin", "owner"})
_MONEY: frozenset[Role] = frozenset({"billing", "admin", "owner"})
_MANAGE: frozenset[Role] = frozenset({"admin", "owner"})
_OWN: frozenset[Role] = frozenset({"owner"})

PERMISSIONS: dict[str, Permission] = {
    "GET /admin/me": Permission(_READ, scoped=True),
    "GET /admin/state": Permission(_READ),
    "GET /admin/metrics": Permission(_READ),
    "GET /admin/policy": Permission(_READ),
    "GET /admin/policy/document": Permission(_READ),
    "GET /admin/history": Permission(_READ),
    "GET /admin/calls": Permission(_READ),
    "GET /admin/batches": Permission(_READ),
    "POST /admin/explain": Permission(_READ),
    "GET /admin/diagnosis": Permission(_READ),
    "GET /admin/keys": Permission(_READ, scoped=True),
    "GET /admin/keys/{key_id}": Permission(_READ, scoped=True),
    "GET /admin/tenants": Permission(_READ, scoped=True),
    "GET /admin/tenants/{name}": Permission(_READ, scoped=True),
    "GET /admin/limits/{tenant}": Permission(_READ, scoped=True),
    "GET /v1/organization/projects": Permission(_READ, scoped=True),
    "GET /v1/organization/projects/{project_id}": Permission(_READ, scoped=True),
    "GET /v1/organization/projects/{project_id}/api_keys": Permission(_READ, scoped=True),
    "GET /v1/organization/projects/{project_id}/api_keys/{key_id}": Permission(_READ, scoped=True),
    "GET /v1/organization/usage/embeddings": Permission(_MONEY, scoped=True),
    "GET /v1/organization/usage/completions": Permission(_MONEY, scoped=True),
    "GET /v1/organization/usage/moderations": Permission(_MONEY, scoped=True),
    "GET /v1/organization/usage/images": Permission(_MONEY, scoped=True),
    "GET /v1/organization/usage/audio_transcriptions": Permission(_MONEY, scoped=True),
    "GET /v1/organization/costs": Permission(_MONEY, scoped=True),
    "POST /admin/keys": Permission(_MANAGE, scoped=True),
    "POST /admin/keys/{key_id}/rotate": Permission(_MANAGE, scoped=True),
    "DELETE /admin/keys/{key_id}": Permission(_MANAGE, scoped=True),
    "POST /admin/tenants": Permission(_MANAGE, scoped=True),
    "PATCH /admin/tenants/{name}": Permission(_MANAGE, scoped=True),
    "DELETE /admin/tenants/{name}": Permission(_MANAGE, scoped=True),
    "DELETE /admin/responses/{tenant}": Permission(_MANAGE, scoped=True),
    "POST /admin/policy/reload": Permission(_MANAGE),
    "POST /admin/diagnosis/apply": Permission(_MANAGE),
    "POST /admin/batches/{id}/cancel": Permission(_MANAGE),
    "POST /admin/playground/{endpoint}": Permission(_MANAGE),
    "GET /admin/admin-keys": Permission(_OWN),
    "POST /admin/admin-keys": Permission(_OWN),
    "DELETE /admin/admin-keys/{key_id}": Permission(_OWN),
    "GET /admin/audit": Permission(_OWN),
}
_OTHERS = Permission(_OWN)
_WITH_SLASHES = ("name", "tenant", "endpoint", "project_id")


def _pattern(path: str) -> str:
    """The regular expression of a path. The name of a tenant, and the path of an endpoint, may have slashes."""
    return re.sub(r"\{(\w+)\}", lambda name: ".+" if name[1] in _WITH_SLASHES else "[^/]+", path)


_PATTERNS = [
    (method, re.compile(_pattern(path)), PERMISSIONS[f"{method} {path}"])
    for method, path in (request.split(" ", 1) for request in PERMISSIONS)
]


def check_permission(actor: Actor, method: str, path: str) -> None:
    """Raise `Forbidden` if an actor's role, or its restriction to an organisation, forbids a request."""
    asked = "GET" if method == "HEAD" else method
    found = (each for known, pattern, each in _PATTERNS if known == asked and pattern.fullmatch(path))
    permission = next(found, _OTHERS)
    if actor.role not in permission.roles:
        raise Forbidden(f"the role {actor.role} may not do this; {' or '.join(sorted(permission.roles))} may")
    if actor.organisation is not None and not permission.scoped:
        raise Forbidden(f"this key is restricted to {actor.organisation!r}, and this concerns the whole gateway")


def may_see_money(request: Request) -> bool:
    """True if the actor of a request may see costs."""
    actor: Actor | None = request.scope.get(ACTOR)
    return actor is None or actor.role in _MONEY


def organisation_of(request: Request) -> str | None:
    """Return the tenant to which the actor of a request is restricted. None if it is not."""
    actor: Actor | None = request.scope.get(ACTOR)
    return None if actor is None else actor.organisation


def check_tenant(request: Request, tenants: TenantRegistry, name: str, *, below: bool = False) -> None:
    """Raise `NotFound` if a tenant does not belong to the actor's organisation, as if it did not exist.

    With `below`, the organisation itself is refused, too: its own limits are set by those who manage all of them.
    """
    organisation = organisation_of(request)
    if organisation is None:
        return
    if not tenants.belongs_to(name, organisation):
        raise NotFound(f"there is no tenant {name!r} in {organisation!r}", param="tenant")
    if below and name == organisation:
        raise Forbidden(f"this key may change tenants below {organisation!r}, and not that one itself")
