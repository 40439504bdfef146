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

_SETUP_STATUSES = {
    401: "the deployment rejected the gateway's key",
    402: "the deployment requires payment: the account of the gateway's key has no credit",
    403: "the deployment denied access to the gateway's key",
    407: "a proxy before the deployment requires a login",
}
_KEY_INVALID = b'"API_KEY_INVALID"'  # Gemini's reason, with status 400
_RETRYABLE_STATUSES = frozenset({408, 409, 429, 498})  # 498: Groq's flex tier has no capacity
_UNSUPPORTED = re.compile(
    r"not (?:yet )?(?:supported|implemented)|unsupported|do(?:es)?(?: not|n't) support|no support for",
    re.IGNORECASE,
)
_UNSUPPORTED_STATUSES = frozenset({400, 405, 415, 422})  # with which servers also say that they lack a feature
_REJECTION_STATUSES = frozenset({400, 403, 413, 422})
# Why a request is rejected, by the words of OpenAI, vLLM, llama.cpp, Anthropic, Gemini and others.
_REASONS = {
    "context": re.compile(
        r"context.?(?:length|window|size)|maximum (?:model|prompt|input|sequence) length|prompt is too long"
        r"|input is too long|too many (?:input )?tokens|token count .{0,40}exceeds",
        re.IGNORECASE,
    ),
    "refused_content": re.compile(
        r"content.?(?:filter|policy|management)|responsible.?ai|moderation|safety (?:system|filter|polic)|was flagged",
        re.IGNORECASE,
    ),
}
_ABOUT_MODEL = re.compile(r"\bmodels?\b", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_RETRY_DELAY = re.compile(rb'"retryDelay"\s*:\s*"(\d{1,9}(?:\.\d{1,9})?)s"')  # Google's, in the body


class _Error(msgspec.Struct):
    """The fields of an error object that say what it is about, at the top level or under `error`."""

    message: Any = None
    type: Any = None
    param: Any = None
    code: Any = None
    error: Any = None


_error = msgspec.json.Decoder(_Error).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


async def status_failure(response: HTTPResponse, content_type: str, redactor: Redactor) -> ProviderFailure:
    """Return the failure for a response with a status of 300 or higher. The caller closes the response."""
    status = response.status
    if status < 400:
        return ProviderFailure(Fault.MALFORMED, f"status {status}: redirects are not followed", status=status)
    if status in _SETUP_STATUSES and status != 403:  # its body is not passed on, because servers quote the key in it
        return _setup_failure(status)
    try:
        body = await response.read_body(MAX_ERROR_BYTES)
    except httpx2.TransportError:
        body = b""  # the status is enough
    if not is_utf8(body):  # clients, and the translators of other API formats, could not read it
        body = body.decode("utf-8", "replace").encode()
    if status == 400 and _KEY_INVALID in body:
        return _setup_failure(status, _SETUP_STATUSES[401])
    body = _one_object(body)
    error = _read_error(body)
    if status == 403 and not _reason_of(status, error):
        return _setup_failure(status)
    if status == 404 and _names_model_or_path(error):
        return _setup_failure(status, "the deployment does not know the model or the path")
    return ProviderFailure(
        _fault_of(status, error),
        f"status {status}",
        status=status,
        body=redactor.body(body),
        content_type=content_type or "text/plain",
        retry_after_seconds=_retry_after_seconds(response, body),
        upstream_message=redactor.text(_text(error.message))[:MAX_MESSAGE_CHARACTERS],
        reason=_reason_of(status, error),
    )


def failure_in_body(error: Any, *, started: bool, redactor: Redactor) -> ProviderFailure:
    """Return the failure for an error value in a response with a success status.

    Servers report an error in this way after they have started to answer. Unless part of the answer has already been
    passed on (`started`), the error is treated like an error status: the one in its `code`, or 500.
    """
    fields = _read_error(msgspec.json.encode(error)) if isinstance(error, dict) else _Error(message=error)
    message = redactor.text(_text(fields.message) or str(error))[:MAX_MESSAGE_CHARACTERS]
    log_message = "the deployment reported an error in its response"
    if started:
        return ProviderFailure(
            Fault.CUT, f"the deployment reported an error: {message}", log_message=log_message, upstream_message=message
        )
    status = fields.code if isinstance(fields.code, int) and 400 <= fields.code < 600 else 500
    if status in _SETUP_STATUSES and not _reason_of(status, fields):
        return _setup_failure(status)
    if status == 404 and _names_model_or_path(fields):
        return _setup_failure(status, "the deployment does not know the model")
    return ProviderFailure(
        _fault_of(status, fields),
        f"the deployment reported an error: {message}",
        status=status,
        body=redactor.body(msgspec.json.encode({"error": error})),
        log_message=log_message,
        upstream_message=message,
        reason=_reason_of(status, fields),
    )


def _read_error(body: bytes) -> _Error:
    """The error object of a body; empty if the body has none."""
    try:
        outer = _error(body)
        return msgspec.convert(outer.error, _Error) if isinstance(outer.error, dict) else outer
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return _Error()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _names_model_or_path(error: _Error) -> bool:
    """Whether a 404 is about the model or the path, which the gateway wrote, and not about a part of the request.

    Other things that a request can name, for example files, have an error with their own parameter or code.
    """
    param, code = _text(error.param), _text(error.code)
    if _ABOUT_MODEL.search(f"{param} {code.replace('_', ' ')} {_text(error.message)}"):
        return True
    return not param and code.lower().replace("_", "").replace(" ", "") in ("", "404", "notfound", "notfounderror")


def _reason_of(status: int, error: _Error) -> str:
    """Why the request was rejected: a name in `_REASONS`, or empty."""
    if status not in _REJECTION_STATUSES:
        return ""
    words = f"{_text(error.code)} {_text(error.type)} {_text(error.message)}"
    return next((reason for reason, pattern in _REASONS.items() if pattern.search(words)), "")


def _fault_of(status: int, error: _Error) -> Fault:
    if _reason_of(status, error):
        return Fault.REFUSED
    says_unsupported = bool(_UNSUPPORTED.search(f"{_text(error.message)} {_text(error.code).replace('_', ' ')}"))
    if status == 501 or (says_unsupported and (status >= 500 or status in _UNSUPPORTED_STATUSES)):
        return Fault.UNSUPPORTED
    return Fault.STATUS if status >= 500 or status in _RETRYABLE_STATUSES else Fault.REFUSED


def _setup_failure(status: int, reason: str = "") -> ProviderFailure:
    """A failure that speaks against the deployment's configuration. Its body is not passed on."""
    return ProviderFailure(Fault.SETUP, f"status {status}: {reason or _SETUP_STATUSES[status]}", status=status)


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
