"""Errors in the words of Anthropic's wire."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, Overloaded, UpstreamBusy, UpstreamRefused
from gateway.endpoints.messages import overflow

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
# A chat's names in a server's refusal, and the client's own.
_OWN_NAMES = (
    ("stop", "stop_sequences"),
    ("max_completion_tokens", "max_tokens"),
    ("reasoning_effort", "output_config.effort"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("tool_choice.function", "tool_choice"),
    ("user", "metadata.user_id"),
)
_PARAMETERS = re.compile(r"(tools\[\d+\])\.function\.parameters")
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
    message = error.message
    if isinstance(error, UpstreamRefused):
        message, details["param"] = _words(error)
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    said: dict[str, Any] = {"type": kind, "message": message}
    if known := {name: value for name, value in details.items() if value}:
        said["details"] = known
    return {"type": "error", "error": said, "request_id": request_id}


def own_name(param: str) -> str:
    """What the client calls that for which a server has refused a chat. A message of a chat is no certain turn."""
    for theirs, own in _OWN_NAMES:
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            return own + param.removeprefix(theirs)
    if param.startswith("tools["):
        return _PARAMETERS.sub(r"\1.input_schema", param).replace("].function", "]", 1)
    return "messages" if param.startswith("messages") else param


def _words(error: UpstreamRefused) -> tuple[str, str | None]:
    """The server's own message, where it is one of those that servers of chat write, and the field that it names."""
    try:
        told = _any(error.content)
    except (msgspec.MsgspecError, RecursionError):
        told = None
    if isinstance(told, dict):
        inner = told.get("error")
        for place in (inner, told) if isinstance(inner, dict) else (told,):
            for name in ("message", "detail"):
                if isinstance(place.get(name), str):
                    return _in_own_words(place[name], place)
        if isinstance(inner, str):
            return inner, None
    words = error.content[: 4 * MAX_WORDS_CHARACTERS].decode("utf-8", "replace")[:MAX_WORDS_CHARACTERS]
    return f"{error.message}: {words}", None


def _in_own_words(message: str, told: dict[str, Any]) -> tuple[str, str | None]:
    param, own = told.get("param"), None
    if isinstance(param, str) and param:
        own = own_name(param)
    if (overflows := overflow.told(message)) is not None:
        return overflows, own
    if own is not None and isinstance(param, str):
        message = re.sub(rf"(?<!\w){re.escape(param)}(?!\w)", own, message)
    if overflow.is_one(told) and own != "max_tokens" and not message.startswith(overflow.TOO_LONG):
        message = f"{overflow.TOO_LONG}: {message}"
    return message, own
