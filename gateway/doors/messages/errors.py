"""Errors in the words of Anthropic's wire."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import GatewayError, Overloaded, UpstreamBusy, UpstreamRefused

OVERLOADED_STATUS = 529  # Anthropic's own, of which its clients know that it passes
MAX_WORDS_CHARACTERS = 300  # of a server's words that are not JSON

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}
_any = msgspec.json.Decoder().decode
_encode = msgspec.json.encode


def refusal(error: GatewayError, request_id: str | None) -> tuple[int, bytes]:
    """The status and the body."""
    status = _status(error)
    return status, _encode(_body(error, status, request_id))


def failure(error: GatewayError, request_id: str) -> bytes:
    """The event that ends a stream which has not come to its end."""
    return b"event: error\ndata: %b\n\n" % _encode(_body(error, _status(error), request_id))


def _status(error: GatewayError) -> int:
    if isinstance(error, UpstreamRefused):
        return error.upstream_status
    return OVERLOADED_STATUS if isinstance(error, (Overloaded, UpstreamBusy)) else error.status


def _body(error: GatewayError, status: int, request_id: str | None) -> dict[str, Any]:
    told = error.body()
    details = {"error_code": told.pop("code"), "param": told.pop("param")}
    details |= {name: value for name, value in told.items() if name not in ("message", "type")}
    message = _words(error) if isinstance(error, UpstreamRefused) else error.message
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    said: dict[str, Any] = {"type": kind, "message": message}
    if known := {name: value for name, value in details.items() if value}:
        said["details"] = known
    return {"type": "error", "error": said, "request_id": request_id}


def _words(error: UpstreamRefused) -> str:
    """The server's own message, where it is one of those that servers of chat write."""
    try:
        told = _any(error.content)
    except msgspec.MsgspecError:
        told = None
    if isinstance(told, dict):
        inner = told.get("error")
        for place in (inner, told) if isinstance(inner, dict) else (told,):
            for name in ("message", "detail"):
                if isinstance(place.get(name), str):
                    return str(place[name])
        if isinstance(inner, str):
            return inner
    words = error.content[: 4 * MAX_WORDS_CHARACTERS].decode("utf-8", "replace")[:MAX_WORDS_CHARACTERS]
    return f"{error.message}: {words}"
