"""`/admin/keys`: creates, lists, rotates and revokes API keys over HTTP, as `warmpath keys` does.

The list has the keys in the storage, and under `policy_keys` those in the policy file, which cannot be changed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.authorization import check_tenant, organisation_of
from gateway.admin.forms import read_form
from gateway.auth.keyring import OVERLAP_SECONDS, Keyring, must_fit, public_form
from gateway.auth.last_uses import LastUses
from gateway.auth.tenants import TenantRegistry
from gateway.core.times import rfc3339
from gateway.endpoints.replies import json_reply
from gateway.policy import Limits, Policy
from gateway.policy.fields import Name, Seconds, parse_duration
from gateway.storage.base import KeyRecord


class _Create(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenant: Name = Field(description="Tenant of the key.")
    id: str | None = None
    expires: Seconds | None = None
    models: tuple[Name, ...] | None = None
    classes: tuple[Name, ...] | None = None
    limits: Limits | None = None


class _Rotate(BaseModel):
    model_config = ConfigDict(extra="forbid")

    overlap: Annotated[float, BeforeValidator(parse_duration)] = OVERLAP_SECONDS


def key_routes(
    keyring: Keyring, policy: Callable[[], Policy], tenants: TenantRegistry, last_uses: LastUses
) -> list[Route]:
    """The routes, to be mounted behind the admin key. New keys are checked against the policy and stored tenants."""

    async def owned(request: Request) -> KeyRecord:
        """The key that the path names. Raises `NotFound`, also for a key of another organisation."""
        record = await keyring.get(request.path_params["key_id"])
        check_tenant(request, tenants, record.tenant)
        return record

    async def create(request: Request) -> Response:
        form = await read_form(request, _Create)
        await tenants.refresh()
        check_tenant(request, tenants, form.tenant)
        stored = tenants.stored_names()
        must_fit(policy(), form.tenant, form.models, form.classes, form.limits, stored_tenants=stored)
        key, record = await keyring.create(
            form.tenant,
            key_id=form.id,
            life_seconds=form.expires,
            models=form.models,
            classes=form.classes,
            limits=form.limits,
        )
        return json_reply(201, {"key": key, **public_form(record)})

    async def listed(request: Request) -> Response:
        tenant = request.query_params.get("tenant")
        organisation = organisation_of(request)

        def is_listed(owner: str) -> bool:
            return tenant in (None, owner) and (organisation is None or tenants.belongs_to(owner, organisation))

        records = [record for record in await keyring.all() if is_listed(record.tenant)]
        in_file = [(key_id, owner.name) for key_id, (owner, _) in policy().keys_by_id.items() if is_listed(owner.name)]
        used = await last_uses.of([*(record.id for record in records), *(key_id for key_id, _ in in_file)])
        data = [{**public_form(record), "last_used": _time(used.get(record.id))} for record in records]
        in_policy = [{"id": key_id, "tenant": owner, "last_used": _time(used.get(key_id))} for key_id, owner in in_file]
        return json_reply(200, {"object": "list", "data": data, "policy_keys": in_policy})

    async def one(request: Request) -> Response:
        record = await owned(request)
        used = await last_uses.of([record.id])
        return json_reply(200, {**public_form(record), "last_used": _time(used.get(record.id))})

    async def rotate(request: Request) -> Response:
        form = await read_form(request, _Rotate)
        if organisation_of(request) is not None:
            await owned(request)
        key, record = await keyring.rotate(request.path_params["key_id"], overlap_seconds=form.overlap)
        return json_reply(200, {"key": key, **public_form(record)})

    async def revoke(request: Request) -> Response:
        if organisation_of(request) is not None:
            await owned(request)
        return json_reply(200, public_form(await keyring.revoke(request.path_params["key_id"])))

    return [
        Route("/admin/keys", listed, methods=["GET"]),
        Route("/admin/keys", create, methods=["POST"]),
        Route("/admin/keys/{key_id}", one, methods=["GET"]),
        Route("/admin/keys/{key_id}", revoke, methods=["DELETE"]),
        Route("/admin/keys/{key_id}/rotate", rotate, methods=["POST"]),
    ]


def _time(ns: int | None) -> str | None:
    """A time in RFC 3339, to the second."""
    return None if ns is None else f"{rfc3339(ns)[:19]}Z"
