"""The admin API and the dashboard: an ASGI application with its own listener and its own keys.

All routes require an admin key or the session of a person who signed in (`sign_in.py`), including those that
`Admin(..., routes=...)` adds, and a role that permits the request (`authorization.py`). Only the dashboard's static
files and signing in do not. Every request that may change something is recorded in the audit log before it is done, and
again with its result. Errors have the same form as all errors of the gateway.

Begin at `Admin`. Each other module adds routes: keys, tenants, admin keys, recent calls and the policy (`views.py`),
usage and costs in OpenAI's form (`usage.py`), the prefix diagnosis, stored responses, and the dashboard's files.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from gateway.admin.admin_keys import admin_key_routes
from gateway.admin.authorization import ACTOR, check_permission, check_tenant, may_see_money
from gateway.admin.dashboard_files import dashboard, is_page
from gateway.admin.forms import MAX_BODY_BYTES
from gateway.admin.keys import key_routes
from gateway.admin.organization import OrganizationApi
from gateway.admin.sign_in import SignInPages, is_session_path
from gateway.admin.tenants import tenant_routes
from gateway.auth.admin_keys import Actor, AdminKeys
from gateway.auth.keyring import Keyring, state_of
from gateway.auth.last_uses import LastUses
from gateway.auth.sessions import Sessions
from gateway.auth.tenants import TenantRegistry
from gateway.billing.audit import AuditLog
from gateway.core.errors import BadRequest, Forbidden, GatewayError, LedgerUnavailable, NotFound, Unauthenticated
from gateway.endpoints.replies import EXCEPTION_HANDLERS, error_reply, json_reply
from gateway.policy import Limits, Tenant
from gateway.policy.file import PolicyHolder

MAX_DETAILS_BYTES = 8 * 1024  # of a request's fields in the audit log; longer ones are omitted
_READS = ("GET", "HEAD", "OPTIONS")
_WITH_PROMPTS = ("/admin/explain", "/admin/playground/")  # requests whose body is that of a client

log = logging.getLogger(__name__)


class Admin:
    """The ASGI application of the admin API. Without any key, it rejects every request.

    `limits_of` returns what is left of a tenant's limits, of those of its keys and of one end user. `state` returns the
    health of the gateway. `audit_folder` is where all chains of the audit log are.
    """

    def __init__(
        self,
        *,
        policies: PolicyHolder,
        keys: AdminKeys,
        sessions: Sessions,
        keyring: Keyring,
        last_uses: LastUses,
        tenants: TenantRegistry,
        audit: AuditLog,
        audit_folder: Path,
        limits_of: Callable[[Tenant, Mapping[str, Limits], str | None], Awaitable[list[dict[str, Any]]]],
        state: Callable[[], Awaitable[dict[str, Any]]],
        routes: Sequence[BaseRoute],
    ) -> None:
        self._policies = policies
        self._keys = keys
        self._keyring = keyring
        self._tenants = tenants
        self._audit = audit
        self._limits_of = limits_of
        self._state = state
        self._dashboard = dashboard()
        self._sign_in = SignInPages(sessions, audit)
        self._routed = Starlette(
            routes=[
                Route("/admin/state", self._show_state),
                Route("/admin/policy/reload", self._reload, methods=["POST"]),
                *key_routes(keyring, lambda: policies.current, tenants, last_uses),
                *tenant_routes(tenants),
                *admin_key_routes(keys, tenants, audit_folder),
                *OrganizationApi(keyring, tenants, last_uses).routes(),
                Route("/admin/limits/{tenant:path}", self._show_limits),
                *routes,
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        self._routed.router.redirect_slashes = False  # a redirect would repeat the Host header that the client sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_page(scope["path"]):
            await self._dashboard(scope, receive, send)
            return
        if scope["type"] == "http" and is_session_path(scope["path"]):
            await self._sign_in.application(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._routed(scope, receive, send)
            return
        try:
            actor = self._actor(scope)
            if scope["method"] in _READS:
                check_permission(actor, scope["method"], scope["path"])
                await self._routed({**scope, ACTOR: actor}, receive, send)
            else:
                await self._audited(actor, {**scope, ACTOR: actor}, receive, send)
        except GatewayError as error:
            await error_reply(error)(scope, receive, send)

    def _actor(self, scope: Scope) -> Actor:
        """Return who sends a request, by its key or else by its session. Raises `Unauthenticated` and `Forbidden`."""
        authorization = Headers(scope=scope).get("authorization")
        if authorization is None and (person := self._sign_in.authenticate(Request(scope))) is not None:
            return person
        scheme, _, presented = (authorization or "").partition(" ")
        actor = self._keys.authenticate(presented.strip()) if scheme.lower() == "bearer" else None
        if actor is None:
            nothing = "there is no admin key, and no session: sign in"
            raise Unauthenticated(nothing if authorization is None else "the admin key is not valid")
        return actor

    async def _audited(self, actor: Actor, scope: Scope, receive: Receive, send: Send) -> None:
        """Record a request, do it, and record its result before the client has the answer.

        Raises `Forbidden` for a request that the actor may not send, and `LedgerUnavailable` if it cannot be recorded.
        """
        body, receive = await _read_ahead(receive)
        act_id = await self._audit.begin(
            f"{scope['method']} {scope['path']}",
            actor=actor.name,
            role=actor.role,
            organisation=actor.organisation,
            details=_details(scope, body),
        )
        status = 0

        async def send_recorded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                await self._record_result(act_id, status)
            await send(message)

        try:
            check_permission(actor, scope["method"], scope["path"])
            await self._routed(scope, receive, send_recorded)
        except Forbidden as error:
            status = error.status
            await self._record_result(act_id, status)
            raise
        finally:
            if not status:
                await self._record_result(act_id, status)

    async def _record_result(self, act_id: str, status: int) -> None:
        try:
            await self._audit.end(act_id, status)
        except LedgerUnavailable as error:  # the act is done, and its first row says so
            log.error("the result %d of the act %s is not in the audit log: %s", status, act_id, error.message)

    async def _show_state(self, _: Request) -> Response:
        return json_reply(200, await self._state())

    async def _reload(self, _: Request) -> Response:
        if not await self._policies.reload():
            raise BadRequest(f"the policy was not reloaded: {self._policies.last_error}")
        return json_reply(200, {"policy": self._policies.current.hash})

    async def _show_limits(self, request: Request) -> Response:
        name = request.path_params["tenant"]
        await self._tenants.refresh()
        check_tenant(request, self._tenants, name)
        tenant = self._tenants.find(name)
        if tenant is None:
            raise NotFound(f"there is no tenant {name!r} in the policy or the storage", param="tenant")
        keys = {key.id: key.limits for key in tenant.keys if key.limits is not None}
        for record in await self._keyring.all():
            if record.tenant == name and record.limits is not None and state_of(record) == "active":
                keys[record.id] = Limits.model_validate(record.limits)
        limits = await self._limits_of(tenant, keys, request.query_params.get("end_user"))
        if not may_see_money(request):
            limits = [limit for limit in limits if limit["limit"] != "budget"]
        return json_reply(200, {"tenant": name, "parents": tenant.parents, "limits": limits})


async def _read_ahead(receive: Receive) -> tuple[bytes, Receive]:
    """Read a request's body, up to one byte more than may be sent. Returns it, and a `receive` that repeats it."""
    messages: list[Message] = []
    body = b""
    while len(body) <= MAX_BODY_BYTES:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if not message.get("more_body"):
            break

    async def repeated() -> Message:
        return messages.pop(0) if messages else await receive()

    return body, repeated


def _details(scope: Scope, body: bytes) -> dict[str, Any] | None:
    """Return a request's fields for the audit log, where no secret and no prompt may be."""
    if scope["path"].startswith(_WITH_PROMPTS):
        return {"key": QueryParams(scope["query_string"]).get("key")}
    if not body or len(body) > MAX_DETAILS_BYTES:
        return None
    try:
        details = msgspec.json.decode(body, type=dict[str, Any])
        orjson.dumps(details)  # which has limits of its own, with which the audit log is shown
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        return None
    return details
