"""Checks of a request's head that llhttp and uvicorn leave out: the Host header, and offered upgrades."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# RFC 9112, 3.2: a host and an optional port, without user information. The delimiters that RFC 3986 also allows in a
# host name occur in no real one, and a comma joins the values of doubled headers.
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+(?:%25[\w.~-]+)?\]|[A-Za-z0-9._~%-]*)(?::[0-9]{0,5})?")
_UPGRADE_TOKENS = (b"upgrade", b"http2-settings")  # options of `connection` that belong to an upgrade

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


def host_error(headers: Headers, version: str) -> str | None:
    """Return what is wrong with the Host header, or None. Proxies that read it differently could be confused by it."""
    host: bytes | None = None
    for name, value in headers:
        if name == b"host":
            if host is not None:
                return "the request has more than one Host header"
            host = value
    if host is None:
        return None if version == "1.0" else "the request has no Host header"
    return None if _HOST.fullmatch(host) else "the Host header is not a host with an optional port"


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """Return a request's head, without the offer to upgrade to another protocol.

    A server may ignore an `Upgrade` header (RFC 9110, 7.8). llhttp cannot: it takes what follows the head for bytes of
    the other protocol. So the head is parsed a second time without the offer, and what follows it is a body again.
    """
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode()), *_kept(headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _kept(headers: Headers) -> Iterator[bytes]:
    for name, value in headers:
        if name in (b"upgrade", b"http2-settings"):
            continue
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() not in _UPGRADE_TOKENS)
        yield b"%b: %b" % (name, value)
