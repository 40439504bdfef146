"""What the Starlette shells share, the gateway's own and the admin's: JSON, and errors in the form of the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ExceptionHandler, Scope

from gateway.core.errors import GatewayError, InternalError, MethodNotAllowed, UnknownUrl
from gateway.endpoints import messages
from gateway.endpoints.rendering import render_error

BASE_PATH = "/v1"
CALL_ID = "warmpath.call_id"  # of a request, in its scope


def json_reply(status: int, value: Any) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_reply(error: GatewayError, scope: Scope | None = None) -> Response:
    """`scope` is that of a request, which may be in another wire's words."""
    headers = {**error.headers, "x-should-retry": "true" if error.retryable else "false"}
    status, content = error.status, render_error(error)
    if scope is not None and messages.asked_for_in(scope):
        status, content = messages.refusal(error, scope.get(CALL_ID))
    return Response(content, status, headers=headers, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_reply(error, request.scope)


async def _unknown_url(request: Request, _: Exception) -> Response:
    path = request.url.path
    message = f"there is no {request.method} {path} here"
    for meant in (f"{BASE_PATH}{path}", path.removeprefix(BASE_PATH)):  # base URLs without it, and with two of them
        if any(route.matches({**request.scope, "path": meant})[0] is not Match.NONE for route in request.app.routes):
            message += f", but {meant}: a base URL ends with {BASE_PATH}, once"
            break
    return error_reply(UnknownUrl(message), request.scope)


async def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.url.path} does not take {request.method}"
    return error_reply(MethodNotAllowed(message, headers=error.headers), request.scope)  # `allow`


async def _bug(request: Request, error: Exception) -> Response:
    message = f"an error in the gateway ({type(error).__name__}); see its log"
    return error_reply(InternalError(message), request.scope)


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = {
    GatewayError: _refuse,
    404: _unknown_url,
    405: _wrong_method,
    Exception: _bug,
}
