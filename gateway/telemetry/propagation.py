"""W3C Trace Context (www.w3.org/TR/trace-context): reads the trace headers of requests, writes those sent upstream.

Incoming headers are validated strictly. Outgoing headers have version 00. Baggage is neither read nor forwarded, since
it is untrusted and engines do not use it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import lru_cache

from gateway.types import Trace

TRACESTATE_MAX_CHARS = 512
TRACESTATE_MAX_MEMBERS = 32

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_LOW_64_BITS = (1 << 64) - 1


def new_span_id() -> int:
    """A random span id; never zero."""
    return random.getrandbits(64) or 1  # zero means no span


def new_span_ids(count: int) -> list[bytes]:
    """Random span ids, as spans have them."""
    drawn = random.getrandbits(64 * count + 1).to_bytes(8 * count + 1)  # one more bit: there may be no spans
    return [drawn[at : at + 8] for at in range(0, 8 * count, 8)]


def begin(headers: Iterable[tuple[bytes, bytes]], sample: float) -> Trace:
    """Return the client's trace with its sampling flag, or a new trace, which is sampled with probability `sample`.

    A trace context that is malformed or sent twice counts as absent, as the specification requires.
    """
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) == 1 and (parent := _parse_traceparent(parents[0])):
        trace_id, span_id, sampled = parent
        return Trace(trace_id, span_id, sampled, _parse_tracestate(states))
    trace_id = random.getrandbits(128) or 1
    # OpenTelemetry's TraceIdRatioBased rule: all services make the same decision, which depends only on the id.
    return Trace(trace_id, 0, trace_id & _LOW_64_BITS < _sampling_bound(sample))


@lru_cache(maxsize=64)
def _sampling_bound(sample: float) -> int:
    return round(sample * (1 << 64))


def outgoing(trace: Trace, span_id: int) -> dict[str, str]:
    """The headers of an upstream request whose span is `span_id`."""
    # Half of what format specifications take.
    headers = {"traceparent": "00-%032x-%016x-%02x" % (trace.trace_id, span_id, trace.sampled)}  # noqa: UP031
    if trace.tracestate:
        headers["tracestate"] = trace.tracestate
    return headers


def _parse_traceparent(value: bytes) -> tuple[int, int, bool] | None:
    match = _TRACEPARENT.fullmatch(value.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    parsed = int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED)
    return parsed if parsed[0] and parsed[1] else None


def _parse_tracestate(values: list[bytes]) -> str:
    """The members, joined and otherwise unchanged. Empty if one is malformed or there are too many."""
    if not values:
        return ""
    joined = b",".join(values).decode("latin-1")
    members = [member for part in joined.split(",") if (member := part.strip(" \t"))]
    kept = ",".join(members)
    keys = {member.partition("=")[0] for member in members}
    if len(kept) > TRACESTATE_MAX_CHARS or len(members) > TRACESTATE_MAX_MEMBERS or len(keys) < len(members):
        return ""
    return kept if all(_MEMBER.fullmatch(member) for member in members) else ""
