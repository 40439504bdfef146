"""How long a client is ready to wait, by its headers: a class's limits hold for all, a client may ask for less.

x-warmpath-timeout         seconds for the whole answer, from the moment in which the request has been read
x-stainless-read-timeout   OpenAI's SDKs announce how long they wait for the next bytes: the first, and any other
x-stainless-timeout        the same in Anthropic's
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gateway.core.errors import BadRequest

_WHOLE = b"x-warmpath-timeout"
_BETWEEN = (b"x-stainless-read-timeout", b"x-stainless-timeout")
TIMEOUT_HEADERS = (_WHOLE, *_BETWEEN)
MIN_SECONDS = 0.001


def total_timeout_seconds(headers: Mapping[bytes, bytes]) -> float:
    """For the whole answer; infinite where nothing is said. Raises `BadRequest` where it is no time."""
    value = headers.get(_WHOLE)
    if value is None:
        return math.inf
    seconds = _seconds(value)
    if seconds is None:
        raise BadRequest(f"{_WHOLE.decode()}: a positive number of seconds is needed", param=_WHOLE.decode())
    return seconds


def read_timeout_seconds(headers: Mapping[bytes, bytes]) -> float:
    """Until the next bytes of the answer; infinite where nothing is said, or nothing that can be read: whoever
    announces it in passing is not refused for it."""
    for name in _BETWEEN:
        if name in headers:
            return _seconds(headers[name]) or math.inf
    return math.inf


def _seconds(value: bytes) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if seconds >= MIN_SECONDS and math.isfinite(seconds) else None
