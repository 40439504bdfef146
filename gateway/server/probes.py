"""Serves GET /v1/models, /health, /ready and /metrics, and every other path that is not a model call (Starlette)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gateway.auth.authenticator import Authenticator
from gateway.endpoints import messages, models
from gateway.endpoints.replies import CALL_ID, EXCEPTION_HANDLERS, json_reply
from gateway.policy.file import PolicyHolder
from gateway.prompts.canonicaliser import new_call_id
from gateway.server.worker_group import WorkerGroup
from gateway.telemetry import Telemetry


class Probes:
    """An ASGI application. `endpoints` are the paths that take POST only, `routes` further ones. `state` describes the
    gateway; its `faults` are the reasons why it is not ready.
    """

    def __init__(
        self,
        policies: PolicyHolder,
        authenticator: Authenticator,
        telemetry: Telemetry,
        worker_group: WorkerGroup,
        state: Callable[[], Awaitable[Mapping[str, Any]]],
        *,
        endpoints: Iterable[str],
        routes: Iterable[Route],
    ) -> None:
        self._policies = policies
        self._authenticator = authenticator
        self._telemetry = telemetry
        self._worker_group = worker_group
        self._state = state
        self._created = int(time.time())
        self._shell = Starlette(
            routes=[
                *(Route(path, _post_only, methods=["POST"]) for path in endpoints),  # other methods get a 405
                *routes,
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        self._shell.router.redirect_slashes = False  # a redirect would repeat whatever Host the client sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._shell(scope, receive, self._named(scope, send))

    def _named(self, scope: Scope, send: Send) -> Send:
        """Adds the request and trace ids to every reply. These requests have no spans."""
        trace = self._telemetry.begin(scope["headers"], sample=0.0)
        call_id = scope[CALL_ID] = new_call_id()
        names = [(b"x-request-id", call_id.encode()), (b"x-trace-id", b"%032x" % trace.trace_id)]
        if scope["type"] == "http" and messages.is_messages_request(scope):
            names.append((b"request-id", call_id.encode()))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *names]}
            await send(message)

        return send_named

    async def _models(self, request: Request) -> Response:
        policy = self._policies.current
        principal = await self._authenticator.authenticate(dict(request.scope["headers"]), policy)
        if messages.is_messages_request(request.scope):
            return json_reply(200, messages.list_models(policy, principal, self._created, request.query_params))
        return json_reply(200, models.list_models(policy, principal, self._created))

    async def _model(self, request: Request) -> Response:
        policy = self._policies.current
        principal = await self._authenticator.authenticate(dict(request.scope["headers"]), policy)
        entry = messages.get_model if messages.is_messages_request(request.scope) else models.get_model
        return json_reply(200, entry(policy, principal, self._created, request.path_params["name"]))

    async def _health(self, _: Request) -> Response:
        """Liveness: the event loop answers."""
        return json_reply(200, {"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        """Readiness: 503 with the reasons if no calls should be sent here."""
        state = await self._state()
        return json_reply(503 if state["faults"] else 200, state)

    async def _metrics(self, request: Request) -> Response:
        own, content_type = self._telemetry.render_metrics(request.headers.get("accept", ""))
        text = await self._worker_group.metrics(own, content_type)
        return Response(text, headers={"content-type": content_type})


async def _post_only(request: Request) -> Response:
    raise AssertionError("POST requests to endpoints are handled by the gateway itself")
