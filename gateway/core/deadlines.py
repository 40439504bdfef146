"""Timeouts that clients send in request headers. These timeouts can only shorten the time limits of a latency class.

x-warmpath-timeout         seconds for the whole answer, counted from when the request has been read
x-stainless-read-timeout   seconds that OpenAI's SDKs wait for the first bytes, and for each further bytes, of an answer
x-stainless-timeout        the same timeout, sent by Anthropic's SDKs
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gateway.core.errors import BadRequest

_TOTAL_HEADER = b"x-warmpath-timeout"
_READ_HEADERS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
TIMEOUT_HEADERS = (_TOTAL_HEADER, *_READ_HEADERS)
MIN_SECONDS = 0.001


def total_timeout_seconds(headers: Mapping[bytes, bytes]) -> float:
    """Return the timeout for the complete answer; infinite without the header. Raises `BadRequest` if it is invalid."""
    value = headers.get(_TOTAL_HEADER)
    if value is None:
        return math.inf
    seconds = _seconds(value)
    if seconds is None:
        name = _TOTAL_HEADER.decode()
        raise BadRequest(f"{name}: must be a positive number of seconds", param=name)
    return seconds


def read_timeout_seconds(headers: Mapping[bytes, bytes]) -> float:
    """Return the timeout for the next bytes of the answer; infinite without a valid header.

    Invalid values are ignored, because SDKs send these headers even if the user has not set a timeout.
    """
    for name in _READ_HEADERS:
        if name in headers:
            return _seconds(headers[name]) or math.inf
    return math.inf


def _seconds(value: bytes) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds >= MIN_SECONDS and math.isfinite(seconds) else None
