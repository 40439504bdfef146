"""What the Starlette shells share, the gateway's own and the admin's: JSON, and every error in the one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from gateway.errors import GatewayError, InternalError, MethodNotAllowed, UnknownUrl
from gateway.replies import render_error


def json_reply(status: int, value: Any) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_reply(error: GatewayError) -> Response:
    headers = {**error.headers, "x-should-retry": "true" if error.retryable else "false"}
    return Response(render_error(error), error.status, headers=headers, media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_reply(error)


async def _unknown_url(request: Request, _: Exception) -> Response:
    return error_reply(UnknownUrl(f"there is no {request.method} {request.url.path} here"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.url.path} does not take {request.method}"
    return error_reply(MethodNotAllowed(message, headers=error.headers))  # `allow`


async def _bug(_: Request, error: Exception) -> Response:
    return error_reply(InternalError(f"an error in the gateway ({type(error).__name__}); see its log"))


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = {
    GatewayError: _refuse,
    404: _unknown_url,
    405: _wrong_method,
    Exception: _bug,
}
