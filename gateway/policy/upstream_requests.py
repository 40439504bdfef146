"""Policy types of what a deployment adds to the requests that it gets: headers, query, body fields, a system prompt."""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import AfterValidator, Field

from gateway.policy.fields import Secret

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
_VALUE = re.compile(r"[\x20-\x7e]{0,8000}")
# The gateway writes these headers itself, or the transport does.
_OWN_HEADERS = frozenset(
    {"host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding", "te", "upgrade",
     "traceparent", "tracestate", *(f"x-{own}" for own in ("request-id", "session-id", "request-deadline-ms"))}
)  # fmt: skip
# The gateway reads these fields to route, limit and bill a request, or sets them to keep tenants apart.
_OWN_FIELDS = frozenset(
    {"model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of", "cache_salt", "priority",
     "kv_transfer_params"}
)  # fmt: skip


def _check_headers(headers: dict[str, str | Secret]) -> dict[str, str | Secret]:
    for name, value in headers.items():
        if _HEADER.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not the name of a header")
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"{name}: the gateway sets this header itself")
        if isinstance(value, str) and _VALUE.fullmatch(value) is None:
            raise ValueError(f"{name}: a value has printable ASCII characters only")
    if len({name.lower() for name in headers}) < len(headers):
        raise ValueError("a header is named twice")
    return headers


def _check_fields(fields: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(fields.keys() & _OWN_FIELDS):
        raise ValueError(f"{name}: the gateway reads or sets this field itself")
    return fields


def _check_header_name(name: str) -> str:
    if _HEADER.fullmatch(name) is None or name.lower() in _OWN_HEADERS:
        raise ValueError(f"{name!r} is not the name of a header, or the gateway sets it itself")
    return name


HeaderName = Annotated[str, AfterValidator(_check_header_name)]
ExtraHeaders = Annotated[dict[str, str | Secret], AfterValidator(_check_headers)]
ExtraQuery = Annotated[dict[Annotated[str, Field(min_length=1)], str], AfterValidator(dict)]
BodyFields = Annotated[dict[str, Any], AfterValidator(_check_fields)]


def encoded_query(query: dict[str, str]) -> bytes:
    """Return the part of a request line after the path. Empty without parameters."""
    pairs = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in query.items())
    return b"?" + pairs.encode() if pairs else b""
