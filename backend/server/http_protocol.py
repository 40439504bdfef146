"""uvicorn's HTTP/1.1 protocol with what it leaves out of a request's safety: upgrades, Host, trailers, unread bodies.

An offered upgrade (h2c, WebSocket) is declined: the request is served over HTTP/1.1, as its sender expects of a server
that does not know the other protocol (RFC 9110, 7.8). llhttp alone would take the body for bytes of that protocol. A
request with a missing, doubled or malformed Host header gets a 400. After a response that came before the end of the
request's body, such as a 413, the rest of the body is read and dropped up to `DROPPED_MAX_BYTES`, because most clients
read the response only after they have sent everything.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from backend.server.asgi import DIRECT_WRITE
from backend.server.errors import InvalidRequest

DROPPED_MAX_BYTES = 256 * 2**20  # of one body, after its response; then the connection is closed
# RFC 9112, 3.2: a host and an optional port, without user information and without delimiters that no real name has.
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+(?:%25[\w.~-]+)?\]|[A-Za-z0-9._~%-]*)(?::[0-9]{0,5})?")
_UPGRADE_TOKENS = (b"upgrade", b"http2-settings")


class StrictProtocol(HttpToolsProtocol):
    """One connection to the engine's server. Builds on uvicorn's inner parts, whose version is pinned."""

    _in_head = False
    _dropped_bytes = 0  # of the current body, after its response

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when bytes arrive."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            self._decline_upgrade(data[offered.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parses the current request again, without the upgrade that it offers. `rest` came after its head."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # llhttp treats it as an upgrade, too
            self.send_400_response("CONNECT is not supported.")
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in _UPGRADE_TOKENS)
            if name not in _UPGRADE_TOKENS:
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _should_upgrade(self) -> bool:
        """Called by uvicorn for a request that offers an upgrade: whether to ignore its head and what comes after."""
        return True

    def on_message_begin(self) -> None:
        """Called by httptools when a request begins."""
        super().on_message_begin()
        self._in_head, self._dropped_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools for each header. Ignores trailers, which must not count as headers (RFC 9110, 6.5.1)."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by httptools at the end of a head."""
        self._in_head = False
        hosts = [value for name, value in self.headers if name == b"host"]
        required = self.parser.get_http_version() != "1.0"
        good = (len(hosts) == 1 and _HOST.fullmatch(hosts[0])) or (not hosts and not required)
        served, self.app = self.app, self.app if good else _BAD_HOST
        super().on_headers_complete()
        self.app = served
        extensions: dict[str, Any] = {DIRECT_WRITE: partial(_write_now, self.cycle)}
        self.scope["extensions"] = extensions  # read when the app's task begins

    def on_body(self, body: bytes) -> None:
        """Called by httptools for each piece of a body."""
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > DROPPED_MAX_BYTES:
                self.transport.close()


def _write_now(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Writes a piece of a streamed response, as `cycle.send` does, without the coroutines of all middlewares."""
    if cycle.disconnected or cycle.transport.is_closing():
        return True  # dropped, as by `cycle.send`
    if not cycle.chunked_encoding or cycle.response_complete or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


async def _refuse_host(scope: Scope, receive: Receive, send: Send) -> None:
    content = InvalidRequest("The request must have exactly one Host header: a host and an optional port.").body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": InvalidRequest.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


_BAD_HOST = cast(ASGI3Application, _refuse_host)
