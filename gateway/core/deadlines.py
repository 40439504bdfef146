"""Timeouts that clients send in request headers. They can shorten the limits of a latency class, never extend them.

x-warmpath-timeout         seconds for the whole answer, counted from when the request has been read
x-stainless-read-timeout   sent by OpenAI's SDKs: how long they wait for the first and for any further bytes, in seconds
x-stainless-timeout        the same, sent by Anthropic's SDKs
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
    """Timeout for the whole answer; infinite without the header. Raises `BadRequest` for an invalid value."""
    value = headers.get(_TOTAL_HEADER)
    if value is None:
        return math.inf
    seconds = _seconds(value)
    if seconds is None:
        name = _TOTAL_HEADER.decode()
        raise BadRequest(f"{name}: must be a positive number of seconds", param=name)
    return seconds


def read_timeout_seconds(headers: Mapping[bytes, bytes]) -> float:
    """Timeout for the next bytes of the answer; infinite without a valid header.

    SDKs send these headers on their own, without a setting of the user, so an invalid value is ignored.
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
