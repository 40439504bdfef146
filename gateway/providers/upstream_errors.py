"""Maps error responses to `ProviderFailure`: who caused it, and the `retry-after`, which the circuit breaker obeys.

`status_failure` handles a response with an error status. `failure_in_body` handles an error that a response with a
success status reports, in an event of the stream or in the JSON body.
"""

from __future__ import annotations

import email.utils
import re
import time
from typing import Any

import httpx2
import msgspec

from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.redaction import Redactor
from gateway.providers.sse import is_utf8
from gateway.providers.transport import HTTPResponse

MAX_ERROR_BYTES = 64 * 1024  # an error body is cut off after this many bytes
MAX_MESSAGE_CHARACTERS = 300  # longest quotation of a deployment's own error text

_OUR_FAULT_STATUSES = frozenset({401, 402, 403, 407})  # the gateway's key is wrong, not the request
_KEY_INVALID = b'"API_KEY_INVALID"'  # Gemini's reason, with status 400
_RETRYABLE_STATUSES = frozenset({408, 409, 429, 498})  # 498: Groq's flex tier has no capacity
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_RETRY_DELAY = re.compile(rb'"retryDelay"\s*:\s*"(\d{1,9}(?:\.\d{1,9})?)s"')  # Google's, in the body

_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


async def status_failure(response: HTTPResponse, content_type: str, redactor: Redactor) -> ProviderFailure:
    """Return the failure for a response with a status of 300 or higher. The caller closes the response."""
    status = response.status
    if status < 400:
        return ProviderFailure(Fault.MALFORMED, f"status {status}: redirects are not followed", status=status)
    if status in _OUR_FAULT_STATUSES:  # the body is not passed on, because servers quote parts of the key in it
        return _key_rejected(status)
    try:
        body = await response.read_body(MAX_ERROR_BYTES)
    except httpx2.TransportError:
        body = b""  # the status is enough
    if not is_utf8(body):  # clients, and the translators of other API formats, could not read it
        body = body.decode("utf-8", "replace").encode()
    if status == 400 and _KEY_INVALID in body:
        return _key_rejected(status)
    return ProviderFailure(
        _fault_of(status),
        f"status {status}",
        status=status,
        body=redactor.body(_one_object(body)),
        content_type=content_type or "text/plain",
        retry_after_seconds=_retry_after_seconds(response, body),
    )


def failure_in_body(error: Any, *, started: bool, redactor: Redactor) -> ProviderFailure:
    """Return the failure for an error value in a response with a success status.

    Servers report an error in this way after they have started to answer. A 4xx code in the error is used as the
    status, unless part of the answer has already been passed on (`started`).
    """
    text = str((error.get("message") or error) if isinstance(error, dict) else error)
    message = redactor.text(text)[:MAX_MESSAGE_CHARACTERS]
    code = error.get("code") if isinstance(error, dict) else None
    fault, status, body = Fault.CUT, None, b""
    if not started and isinstance(code, int) and 400 <= code < 500:
        if code in _OUR_FAULT_STATUSES:
            return _key_rejected(code)
        fault, status, body = _fault_of(code), code, redactor.body(msgspec.json.encode({"error": error}))
    log_message = "the deployment reported an error in its response"
    return ProviderFailure(
        fault,
        f"the deployment reported an error: {message}",
        status=status,
        body=body,
        log_message=log_message,
        upstream_message=message,
    )


def _fault_of(status: int) -> Fault:
    return Fault.STATUS if status >= 500 or status in _RETRYABLE_STATUSES else Fault.REFUSED


def _key_rejected(status: int) -> ProviderFailure:
    return ProviderFailure(Fault.STATUS, f"status {status}: the deployment rejected the gateway's key", status=status)


def _one_object(body: bytes) -> bytes:
    """Return the error body. If it is a list with one error object, as Gemini sends it, returns that object."""
    if not body.startswith(b"["):
        return body
    try:
        (error,) = _list(body)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return body
    return bytes(error)


def _retry_after_seconds(response: HTTPResponse, body: bytes) -> float | None:
    """Return the retry delay in seconds, or None.

    Reads `retry-after-ms`, else `retry-after` (in seconds or as an HTTP date), else Google's delay in the body.
    """
    if _NUMBER.fullmatch(milliseconds := response.header(b"retry-after-ms").decode("latin-1")):
        return float(milliseconds) / 1000
    if _NUMBER.fullmatch(value := response.header(b"retry-after").decode("latin-1")):
        return float(value)
    if not value and (delay := _RETRY_DELAY.search(body)) is not None:
        return float(delay[1])
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
