"""Requests of operators in the name of an API key: `POST /admin/explain` and `POST /admin/playground/{endpoint}`.

The query names the key by its id (`key`), and `header` is repeated for each further header, as in `x-team: search`. The
body is that of the client's request, byte for byte.

`explain` returns what `warmpath explain` prints, for the deployments as they are now; nothing is sent. The playground
sends the request through the gateway like a client's: it has the key's limits, is billed to the key, and is listed with
the last calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.admin.forms import read_body
from gateway.auth.authenticator import Authenticator
from gateway.auth.key_ids import KEY_ID_HEADER
from gateway.core.errors import BadRequest, NotFound
from gateway.deployments.fleet import Fleet
from gateway.endpoints import ENDPOINTS
from gateway.endpoints.base import Endpoint
from gateway.endpoints.replies import json_reply
from gateway.explanation import Explainer
from gateway.policy import choices
from gateway.policy.file import PolicyHolder
from gateway.routing.router import Router
from gateway.types import Principal

EXPLAINED_MAX_BYTES = 4 * 2**20  # of a request's body; longer ones block the event loop for too long
HEADERS_MAX = 50

Headers = list[tuple[bytes, bytes]]
Handle = Callable[[str, Scope, Receive, Send], Awaitable[None]]
"""Handles a request to an endpoint (its path) whose key is named by `KEY_ID_HEADER`."""

_ENDPOINTS: dict[str, Endpoint] = {endpoint.path: endpoint for endpoint in ENDPOINTS}


class OperatorRequests:
    """The routes. `authenticator` finds a key's principal, and `handle` runs a request through the gateway."""

    def __init__(
        self,
        policies: PolicyHolder,
        authenticator: Authenticator,
        fleet: Fleet,
        router: Router,
        secret: bytes,
        handle: Handle,
    ) -> None:
        self._policies = policies
        self._authenticator = authenticator
        self._fleet = fleet
        self._router = router
        self._secret = secret
        self._handle = handle

    def routes(self) -> list[Route]:
        """The routes, to be mounted behind the admin key."""
        play = _Asgi(self._play)
        return [
            Route("/admin/explain", self._explain, methods=["POST"]),
            Route("/admin/playground/{endpoint:path}", play, methods=["POST"]),
        ]

    async def _explain(self, request: Request) -> Response:
        path = request.query_params.get("endpoint", "chat/completions")
        if path not in _ENDPOINTS:
            raise BadRequest(f"endpoint: {choices(path, _ENDPOINTS)}", param="endpoint")
        headers = _headers(request.query_params)
        principal = await self._principal(request.query_params)
        body = await read_body(request, EXPLAINED_MAX_BYTES)
        explainer = Explainer(self._policies.current, self._fleet, self._router, self._secret)
        try:
            explanation = explainer.explain(_ENDPOINTS[path], body, dict(headers), principal)
            return json_reply(200, {**explanation.json, "tenant": principal.tenant_name, "key": principal.key_id})
        except RecursionError:
            raise BadRequest("the body has too many levels to be explained") from None

    async def _play(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        path = request.path_params["endpoint"]
        if path not in _ENDPOINTS:
            raise NotFound(f"there is no endpoint {path[:100]!r}; {choices(path, _ENDPOINTS)}", param="endpoint")
        principal = await self._principal(request.query_params)
        kept = [(name, value) for name, value in scope["headers"] if name in (b"content-type", b"content-length")]
        headers = [*kept, *_headers(request.query_params), (KEY_ID_HEADER, principal.key_id.encode())]
        # Without extensions, since body and reply must pass `receive` and `send`, where the audit log reads them.
        inner = {**scope, "path": f"/v1/{path}", "query_string": b"", "headers": headers, "extensions": {}}
        await self._handle(path, inner, receive, send)

    async def _principal(self, query: QueryParams) -> Principal:
        """The principal of the named key. Raises `BadRequest` or `NotFound`."""
        key_id = query.get("key")
        if not key_id:
            raise BadRequest("key: is required: the id of an API key", param="key")
        principal = await self._authenticator.principal_of(key_id, self._policies.current)
        if principal is None:
            raise NotFound(f"there is no valid key {key_id[:100]!r} of a tenant in the policy", param="key")
        return principal


class _Asgi:
    """An ASGI application. Starlette calls a method with a request, and an object with the ASGI arguments."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _headers(query: QueryParams) -> Headers:
    """The further headers. Raises `BadRequest`."""
    found: Headers = []
    for line in query.getlist("header"):
        name, colon, value = line.partition(":")
        name = name.strip().lower()
        if not colon or not name.isascii() or not name or not value.isascii() or not value.isprintable():
            raise BadRequest("header: must have the form `name: value`, in ASCII", param="header")
        found.append((name.encode(), value.strip().encode()))
    if len(found) > HEADERS_MAX:
        raise BadRequest(f"header: at most {HEADERS_MAX} are allowed", param="header")
    return found


__all__ = ["Handle", "OperatorRequests"]
