"""The admin API and the dashboard: an ASGI application with its own listener and its own key.

All routes require the admin key, including those that `Admin(..., routes=...)` adds. Only the dashboard's static files
do not. Errors have the same form as all errors of the gateway.

Begin at `Admin`. Each other module adds routes: keys, recent calls and the policy (`views.py`), usage and costs in
OpenAI's form (`usage.py`), the prefix diagnosis, stored responses, and the dashboard's files.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gateway.admin.dashboard_files import dashboard, is_page
from gateway.admin.keys import key_routes
from gateway.auth.keyring import Keyring, state_of
from gateway.core.errors import BadRequest, NotFound, Unauthenticated
from gateway.endpoints.replies import EXCEPTION_HANDLERS, error_reply, json_reply
from gateway.policy import Limits, Tenant, choices
from gateway.policy.file import PolicyHolder


class Admin:
    """The ASGI application of the admin API. Without a key, it rejects every request.

    `limits_of` returns what is left of a tenant's limits and those of its keys, `state` the health of the gateway.
    """

    def __init__(
        self,
        *,
        policies: PolicyHolder,
        key: SecretStr | None,
        keyring: Keyring,
        limits_of: Callable[[Tenant, Mapping[str, Limits]], Awaitable[list[dict[str, Any]]]],
        state: Callable[[], Awaitable[dict[str, Any]]],
        routes: Sequence[BaseRoute],
    ) -> None:
        self._policies = policies
        self._key = key.get_secret_value().encode() if key is not None else None
        self._keyring = keyring
        self._limits_of = limits_of
        self._state = state
        self._dashboard = dashboard()
        self._routed = Starlette(
            routes=[
                Route("/admin/state", self._show_state),
                Route("/admin/policy/reload", self._reload, methods=["POST"]),
                *key_routes(keyring, lambda: policies.current),
                Route("/admin/limits/{tenant:path}", self._show_limits),
                *routes,
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        self._routed.router.redirect_slashes = False  # a redirect would repeat the Host header that the client sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_page(scope["path"]):
            await self._dashboard(scope, receive, send)
        elif scope["type"] == "http" and not self._is_admin(Headers(scope=scope)):
            reply = error_reply(Unauthenticated("the admin key is not valid"))
            await reply(scope, receive, send)
        else:
            await self._routed(scope, receive, send)

    def _is_admin(self, headers: Headers) -> bool:
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        if self._key is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(presented.strip().encode("latin-1"), self._key)

    async def _show_state(self, _: Request) -> Response:
        return json_reply(200, await self._state())

    async def _reload(self, _: Request) -> Response:
        if not await self._policies.reload():
            raise BadRequest(f"the policy was not reloaded: {self._policies.last_error}")
        return json_reply(200, {"policy": self._policies.current.hash})

    async def _show_limits(self, request: Request) -> Response:
        name, known = request.path_params["tenant"], self._policies.current.tenants_by_name
        tenant = known.get(name)
        if tenant is None:
            raise NotFound(f"there is no tenant {name!r} in the policy; {choices(name, known)}", param="tenant")
        keys = {key.id: key.limits for key in tenant.keys if key.limits is not None}
        for record in await self._keyring.all():
            if record.tenant == name and record.limits is not None and state_of(record) == "active":
                keys[record.id] = Limits.model_validate(record.limits)
        return json_reply(200, {"tenant": name, "limits": await self._limits_of(tenant, keys)})
