"""What a bad status says: whose fault it is, when to come back, and the server's own words in OpenAI's form. And what
an error says that comes in the place of an answer, with a status that promised one."""

from __future__ import annotations

import email.utils
import re
import time
from typing import Any

import httpx2
import msgspec

from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.transport import HTTPResponse

MAX_ERROR_BYTES = 64 * 1024  # of the body of a refusal; the rest is left out
MAX_MESSAGE_CHARACTERS = 300  # of a server's own words inside a failure's message

_OUR_FAULT_STATUSES = frozenset({401, 402, 403, 407})  # our key at that server, which is none of the client's business
_KEY_INVALID = b'"API_KEY_INVALID"'  # Gemini's reason, with a 400
_MAY_PASS_STATUSES = frozenset({408, 409, 429, 498})  # 498: Groq has no room in its flex tier
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_RETRY_DELAY = re.compile(rb'"retryDelay"\s*:\s*"(\d{1,9}(?:\.\d{1,9})?)s"')  # Google's, inside of the body

_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


async def status_failure(answer: HTTPResponse, content_type: str) -> ProviderFailure:
    status = answer.status
    if status < 400:
        return ProviderFailure(Fault.MALFORMED, f"status {status}: redirects are not followed", status=status)
    if status in _OUR_FAULT_STATUSES:  # without the body: servers quote parts of the key in it
        return _key_refused(status)
    try:
        body = await answer.rest(MAX_ERROR_BYTES)
    except httpx2.TransportError:
        body = b""  # the status says enough
    if status == 400 and _KEY_INVALID in body:
        return _key_refused(status)
    return ProviderFailure(
        _fault_of(status),
        f"status {status}",
        status=status,
        body=_one_object(body),
        content_type=content_type or "text/plain",
        retry_after_seconds=_retry_after_seconds(answer, body),
    )


def failure_in_body(error: Any, *, begun: bool) -> ProviderFailure:
    """Of an error in an answer with a good status, as servers tell of it that have begun to work. Where nothing of the
    answer has been passed on (`begun`), a code that judges the request or asks for patience is as good as a status.
    """
    message = str((error.get("message") or error) if isinstance(error, dict) else error)[:MAX_MESSAGE_CHARACTERS]
    code = error.get("code") if isinstance(error, dict) else None
    fault, status, body = Fault.CUT, None, b""
    if not begun and isinstance(code, int) and 400 <= code < 500:
        if code in _OUR_FAULT_STATUSES:
            return _key_refused(code)
        fault, status, body = _fault_of(code), code, msgspec.json.encode({"error": error})
    log_message = "the server reported an error in its answer"
    return ProviderFailure(
        fault,
        f"the server says: {message}",
        status=status,
        body=body,
        log_message=log_message,
        upstream_message=message,
    )


def _fault_of(status: int) -> Fault:
    return Fault.STATUS if status >= 500 or status in _MAY_PASS_STATUSES else Fault.REFUSED


def _key_refused(status: int) -> ProviderFailure:
    return ProviderFailure(Fault.STATUS, f"status {status}: the server does not accept our key", status=status)


def _one_object(body: bytes) -> bytes:
    """Without the list that Gemini puts its error into."""
    if not body.startswith(b"["):
        return body
    try:
        (error,) = _list(body)
    except (ValueError, RecursionError):  # msgspec's are such, too
        return body
    return bytes(error)


def _retry_after_seconds(answer: HTTPResponse, body: bytes) -> float | None:
    """`retry-after-ms`, else `retry-after` in seconds or as an HTTP date, else the body's; None where none is there."""
    if _NUMBER.fullmatch(milliseconds := answer.header(b"retry-after-ms").decode("latin-1")):
        return float(milliseconds) / 1000
    if _NUMBER.fullmatch(value := answer.header(b"retry-after").decode("latin-1")):
        return float(value)
    if not value and (delay := _RETRY_DELAY.search(body)) is not None:
        return float(delay[1])
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
