"""Encodes errors for clients in OpenAI's error format, as the body of a reply or as an event of a stream."""

from __future__ import annotations

import orjson

from gateway.core.errors import GatewayError, UpstreamRefused
from gateway.endpoints.wire import JSON_TYPE

MAX_UPSTREAM_TEXT_CHARACTERS = 300  # longest quotation of an upstream error inside the gateway's error


def render_error(error: GatewayError) -> bytes:
    """Return the error object as the JSON body of a reply."""
    return orjson.dumps({"error": error.body()})


def error_frame(error: GatewayError) -> bytes:
    """Return the error as an event of a stream that has begun. The stream ends after this event without `[DONE]`."""
    return b"data: " + render_error(error) + b"\n\n"


def status_and_body(error: GatewayError) -> tuple[int, bytes]:
    """Return the status and body of an error reply. An upstream's error keeps its status and text."""
    if isinstance(error, UpstreamRefused):
        return error.upstream_status, _upstream_body(error)
    return error.status, render_error(error)


def _upstream_body(error: UpstreamRefused) -> bytes:
    """Return the upstream's body if its `error` is an object. Any other body is quoted in an error object.

    Others are HTML pages, and the bare errors of servers: `{"detail": ...}` of FastAPI, `{"object": "error", ...}` of
    LMDeploy, `{"error": "..."}` of OpenVINO Model Server.
    """
    text = error.content[: 4 * MAX_UPSTREAM_TEXT_CHARACTERS].decode("utf-8", "replace")
    if error.content_type.partition(";")[0].strip().lower() == JSON_TYPE:
        try:
            body = orjson.loads(error.content)
        except orjson.JSONDecodeError:
            return error.content
        if not isinstance(body, dict) or isinstance(body.get("error"), dict):
            return error.content
        said = body.get("error") or body.get("message") or body.get("detail")
        text = said if isinstance(said, str) else text
    text = text[:MAX_UPSTREAM_TEXT_CHARACTERS]
    return orjson.dumps({"error": {**error.body(), "message": f"{error.message}: {text}"}})
