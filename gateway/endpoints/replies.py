"""JSON replies and error replies for the Starlette routes of the public API and the admin API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ExceptionHandler, Scope

from gateway.core.errors import GatewayError, InternalError, MethodNotAllowed, UnknownUrl, UpgradeRequired
from gateway.endpoints import messages
from gateway.endpoints.rendering import render_error

BASE_PATH = "/v1"
WEBSOCKET_KEY = "sec-websocket-key"  # a header of every request for a WebSocket
HTTP_1_1 = {"upgrade": "HTTP/1.1"}  # the protocol that a 426 must name
CALL_ID = "warmpath.call_id"  # key under which an ASGI scope has the request id


def json_reply(status: int, value: Any) -> Response:
    """Return a reply with `value` as JSON."""
    try:
        content = orjson.dumps(value)
    except TypeError:  # integers of more than 64 bits, or more than 254 levels, both from a client's JSON
        content = json.dumps(value).encode()
    return Response(content, status, media_type="application/json")


def error_reply(error: GatewayError, scope: Scope | None = None) -> Response:
    """Return an error reply, in Anthropic's format if `scope` is a request of Anthropic's API, else in OpenAI's."""
    headers = {**error.headers, "x-should-retry": "true" if error.retryable else "false"}
    status, content = error.status, render_error(error)
    if scope is not None and messages.is_messages_request(scope):
        status, content = messages.error_response(error, scope.get(CALL_ID))
    return Response(content, status, headers=headers, media_type="application/json")


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_reply(error, request.scope)


async def _unknown_url(request: Request, _: Exception) -> Response:
    path = request.url.path
    message = f"{request.method} {path} does not exist"
    # A client's base URL often lacks /v1 or contains it twice. The message then suggests the path that exists.
    for meant in (f"{BASE_PATH}{path}", path.removeprefix(BASE_PATH)):
        if any(route.matches({**request.scope, "path": meant})[0] is not Match.NONE for route in request.app.routes):
            message += f", but {meant} does: the base URL must end with {BASE_PATH} once"
            break
    return error_reply(UnknownUrl(message), request.scope)


async def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method == "GET" and WEBSOCKET_KEY in request.headers:
        refusal = UpgradeRequired(f"{request.url.path} has no WebSocket mode: send a POST", headers=HTTP_1_1)
        return error_reply(refusal, request.scope)
    # A path can have several routes, each with methods of its own. The router's own `allow` has those of the first.
    found = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = ", ".join(sorted({method for route in found for method in getattr(route, "methods", None) or ()}))
    message = f"{request.url.path} does not support {request.method}"
    return error_reply(MethodNotAllowed(message, headers={"allow": methods}), request.scope)


async def _bug(request: Request, error: Exception) -> Response:
    message = f"internal error in the gateway ({type(error).__name__}); see its log"
    return error_reply(InternalError(message), request.scope)


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = {
    GatewayError: _gateway_error,
    404: _unknown_url,
    405: _wrong_method,
    Exception: _bug,
}
