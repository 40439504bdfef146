"""Encodes errors in Anthropic's format, as replies and as stream events.

If an engine rejects a request, the engine's message names fields of the chat request. They are replaced by the names of
the fields that the client sent.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, Overloaded, UpstreamBusy, UpstreamRefused
from gateway.endpoints.messages import context_overflow

OVERLOADED_STATUS = 529  # Anthropic's status for overload; Anthropic's clients retry it
MAX_RAW_CHARACTERS = 300  # longest quotation of an upstream error body that is not JSON

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
# Field names of a chat request, as engines' errors contain them, and the client's fields that they came from.
_CLIENT_FIELDS = (
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


def error_response(error: GatewayError, request_id: str | None) -> tuple[int, bytes]:
    """Return the status and body of an error reply."""
    status = _status(error)
    return status, _encode(_body(error, status, request_id))


def error_event(error: GatewayError, request_id: str) -> bytes:
    """Return the `error` event that ends a failed stream. Used if part of the reply has been sent."""
    return b"event: error\ndata: %b\n\n" % _encode(_body(error, _status(error), request_id))


def _status(error: GatewayError) -> int:
    if isinstance(error, UpstreamRefused):
        return error.upstream_status
    return OVERLOADED_STATUS if isinstance(error, (Overloaded, UpstreamBusy)) else error.status


def _body(error: GatewayError, status: int, request_id: str | None) -> dict[str, Any]:
    body = error.body()
    details = {"error_code": body.pop("code"), "param": body.pop("param")}
    details |= {name: value for name, value in body.items() if name not in ("message", "type")}
    message = error.message
    if isinstance(error, UpstreamRefused):
        message, details["param"] = _upstream_message(error)
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    content: dict[str, Any] = {"type": kind, "message": message}
    if known := {name: value for name, value in details.items() if value}:
        content["details"] = known
    return {"type": "error", "error": content, "request_id": request_id}


def client_field(param: str) -> str:
    """Return the name of the client's field that became the chat field `param`, which an engine rejected.

    The index of a chat message is dropped, because a chat message does not always correspond to one client message.
    """
    for chat_name, client_name in _CLIENT_FIELDS:
        if param == chat_name or param.startswith((f"{chat_name}.", f"{chat_name}[")):
            return client_name + param.removeprefix(chat_name)
    if param.startswith("tools["):
        return _PARAMETERS.sub(r"\1.input_schema", param).replace("].function", "]", 1)
    return "messages" if param.startswith("messages") else param


def _upstream_message(error: UpstreamRefused) -> tuple[str, str | None]:
    """Return the message of an upstream error, and the client's field that it is about.

    Engines put the message at different places in their JSON. A body of another form is shortened and quoted.
    """
    try:
        body = _any(error.content)
    except (msgspec.MsgspecError, RecursionError):
        body = None
    if isinstance(body, dict):
        inner = body.get("error")
        for place in (inner, body) if isinstance(inner, dict) else (body,):
            for name in ("message", "detail"):
                if isinstance(place.get(name), str):
                    return _in_client_terms(place[name], place)
        if isinstance(inner, str):
            return inner, None
    text = error.content[: 4 * MAX_RAW_CHARACTERS].decode("utf-8", "replace")[:MAX_RAW_CHARACTERS]
    return f"{error.message}: {text}", None


def _in_client_terms(message: str, details: dict[str, Any]) -> tuple[str, str | None]:
    param, own = details.get("param"), None
    if isinstance(param, str) and param:
        own = client_field(param)
    if (overflows := context_overflow.anthropic_message(message)) is not None:
        return overflows, own
    if own is not None and isinstance(param, str):
        message = re.sub(rf"(?<!\w){re.escape(param)}(?!\w)", own, message)
    if (
        context_overflow.is_overflow(details)
        and own != "max_tokens"
        and not message.startswith(context_overflow.TOO_LONG)
    ):
        message = f"{context_overflow.TOO_LONG}: {message}"
    return message, own
