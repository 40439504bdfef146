"""`/admin/keys`: creates, lists, rotates and revokes API keys over HTTP, as `warmpath keys` does."""

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
from gateway.auth.tenants import TenantRegistry
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


def key_routes(keyring: Keyring, policy: Callable[[], Policy], tenants: TenantRegistry) -> list[Route]:
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
        records = [
            record
            for record in await keyring.all()
            if tenant in (None, record.tenant)
            and (organisation is None or tenants.belongs_to(record.tenant, organisation))
        ]
        return json_reply(200, {"object": "list", "data": [public_form(record) for record in records]})

    async def one(request: Request) -> Response:
        return json_reply(200, public_form(await owned(request)))

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
