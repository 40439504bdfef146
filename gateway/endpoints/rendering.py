"""The one place that renders an error for a client, in OpenAI's form."""

from __future__ import annotations

import orjson

from gateway.core.errors import GatewayError, UpstreamRefused
from gateway.endpoints.wire import JSON_TYPE

MAX_UPSTREAM_TEXT_CHARACTERS = 300  # of an upstream's own text inside an error of ours


def render_error(error: GatewayError) -> bytes:
    """The error object as the JSON body of a reply."""
    return orjson.dumps({"error": error.body()})


def error_frame(error: GatewayError) -> bytes:
    """The error as an event of a stream that has begun. No `[DONE]` follows it."""
    return b"data: " + render_error(error) + b"\n\n"


def status_and_body(error: GatewayError) -> tuple[int, bytes]:
    """The reply to a request that failed before its first byte. An upstream's refusal keeps its status and text."""
    if isinstance(error, UpstreamRefused):
        return error.upstream_status, _upstream_body(error)
    return error.status, render_error(error)


def _upstream_body(error: UpstreamRefused) -> bytes:
    """The upstream's body if it is JSON. Anything else is quoted in an error of ours: it could be an HTML page."""
    if error.content_type.partition(";")[0].strip().lower() == JSON_TYPE:
        return error.content
    text = error.content[: 4 * MAX_UPSTREAM_TEXT_CHARACTERS].decode("utf-8", "replace")[:MAX_UPSTREAM_TEXT_CHARACTERS]
    return orjson.dumps({"error": {**error.body(), "message": f"{error.message}: {text}"}})
