"""HTTP/1.1 protocol: uvicorn's, with a faster write path, stricter heads, and bounds on connections, heads and bodies.

uvicorn spends most of its time per request on writing the reply. This module checks all headers of a reply at once
instead of one by one. It sends them together with the first bytes of the body, so a short reply takes one system call.
Everything else is uvicorn's code.

A request whose Host header is missing, doubled or malformed gets a 400. An offered upgrade (h2c, WebSocket) is
declined: the request is served over HTTP/1.1. If a reply ends before the request's body has arrived, as a 413 does, the
rest of the body is read and dropped, up to a bound, because most clients read the reply only after they have sent
everything.

Each request's scope has a `Wire` under the extension `WIRE`. Unlike ASGI's `send`, a `Wire` writes without a coroutine
while the client reads fast enough. It reports a disconnect without a task that waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.core.errors import BadRequest
from gateway.core.timers import LATE_SECONDS
from gateway.endpoints.rendering import render_error
from gateway.endpoints.wire import JSON_TYPE, WIRE
from gateway.providers.text_events import ClientFlow
from gateway.server.request_head import head_without_upgrade, host_error

MAX_CONNECTIONS = 20_000  # per process; a further one gets a 503 and is closed
MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 10.0  # from the first bytes of a head to its end
SILENT_SECONDS = 75.0  # of a new connection before its first bytes: clients open some in advance
LINGER_MAX_BYTES = 256 * 2**20  # of a body that are dropped after its reply; then the connection is closed
LINGER_SECONDS = 30.0
_BODILESS_STATUSES = frozenset({204, 304})


class Connections(ServerState):
    """State that all connections of a server share. If `leaving`, each connection closes after its current reply."""

    def __init__(self, maximum: int = MAX_CONNECTIONS) -> None:
        super().__init__()
        self.maximum = maximum
        self.leaving = False


class ReplyFlow(FlowControl):
    """A connection's flow control, which also reports its loss. Implements `ClientFlow`."""

    when_lost: Callable[[], None] | None = None


class JoinedCycle(RequestResponseCycle):
    """One request and its reply; implements `Wire`. Rare cases (HEAD, replies without a body) take uvicorn's path."""

    def __init__(self, protocol: JoinedProtocol, *, keep_alive: bool) -> None:
        """Set what uvicorn's `__init__` sets, and what is needed here."""
        self.scope = protocol.scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.access_logger = protocol.access_logger
        self.access_log = protocol.access_log
        self.default_headers = protocol.server_state.default_headers
        self.message_event = asyncio.Event()
        self.on_response = protocol.on_response_complete
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.body = b""  # type: ignore[assignment]  # a `bytearray` only if it arrives in several parts
        self.disconnected = False
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0
        self._head: bytes | None = None  # held back until the first bytes of the body
        self._joins = False
        self._is_streaming = False  # the head is sent, and chunks follow
        self._tell: Callable[[], None] | None = None

    async def send(self, message: ASGISendEvent) -> None:
        if self._put(message):
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self._put(message):
            await super().send(message)  # uvicorn's path, which also reports misuse

    def begin(self, status: int, lines: bytes, *, length: int | None, close: bool) -> bool:
        """See `Wire.begin`. The caller has checked the lines."""
        if self.disconnected:
            return True
        if (
            self.flow.write_paused
            or self.response_started
            or status in _BODILESS_STATUSES
            or self.scope["method"] == "HEAD"
        ):
            return False
        self.expected_content_length, self.chunked_encoding = length or 0, length is None
        head = STATUS_LINE[status] + lines
        if self.default_headers:
            head += b"".join([b"%b: %b\r\n" % header for header in self.default_headers])
        if self.chunked_encoding:
            head += b"transfer-encoding: chunked\r\n"
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # the client may send the body or not, so the next request could not be found
        if close:
            self.keep_alive = False
        elif not self.keep_alive:
            head += b"connection: close\r\n"
        self._head = head + b"\r\n"
        self.response_started = self._joins = True
        self.waiting_for_100_continue = False
        return True

    def whole_body(self) -> bytes | None:
        """See `Wire.whole_body`."""
        if self.more_body or self.disconnected or self.response_complete:
            return None
        body, self.body = bytes(self.body), b""  # type: ignore[assignment]
        self.message_event.clear()
        return body

    def _put(self, message: ASGISendEvent) -> bool:
        """Send a message without waiting. False: nothing was sent."""
        if self.disconnected:
            return True
        if not self.response_started:
            return self._begin_with(message)
        if message["type"] != "http.response.body":
            return False
        return self.write(message.get("body", b""), not message.get("more_body", False))

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """See `Wire.when_gone`."""
        self._tell = tell
        if self.flow.read_paused:
            self.flow.resume_reading()  # a paused socket would not report the disconnect
        if tell is not None and self.disconnected:
            tell()

    def gone(self) -> None:
        """Call the application's `when_gone` callback if the connection is lost."""
        if self.disconnected and self._tell is not None:
            self._tell()

    def _begin_with(self, message: Any) -> bool:
        """`begin` from an ASGI message."""
        if message["type"] != "http.response.start":
            return False
        headers = [(name.lower(), value) for name, value in message.get("headers", ())]
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers) or b"\0" in lines:
            raise RuntimeError("Invalid HTTP header.")
        values = dict(headers)
        length = int(values[b"content-length"]) if b"content-length" in values else None
        return self.begin(
            message["status"], lines, length=length, close=b"close" in values.get(b"connection", b"").lower()
        )

    def write(self, chunk: bytes, last: bool) -> bool:
        """See `Wire.write`."""
        if self.disconnected:
            return True
        if self._is_streaming and chunk and not last and not self.flow.write_paused:
            self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            return True
        if self.flow.write_paused or not self._joins or self.response_complete:
            return False
        self._is_streaming = self.chunked_encoding is True and not last
        if self.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunk else b""
            if last:
                data += b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(chunk)
            if self.expected_content_length < 0 or (last and self.expected_content_length):
                raise RuntimeError("The reply is not as long as its content-length says.")
            data = chunk
        if self._head is not None:
            data, self._head = self._head + data, None
        self.transport.write(data)
        if last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                if self.more_body:  # closing now would reset the connection, and the client would lose the reply
                    self.transport.write_eof()
                else:
                    self.transport.close()
            self.on_response()
        return True

    def coded_writer(self) -> tuple[ClientFlow, asyncio.Transport] | None:
        """See `Wire.coded_writer`."""
        assert isinstance(self.flow, ReplyFlow)
        return (self.flow, self.transport) if self._is_streaming and not self.disconnected else None


class JoinedProtocol(HttpToolsProtocol):
    """One connection, with bounds that uvicorn lacks: number of connections, size and time of a request head.

    A client that sends nothing or very slowly can use one connection only for a bounded time."""

    _dropped_bytes = 0  # of the current body, after its reply
    _linger_end: asyncio.TimerHandle | None = None  # while the rest of a body is dropped

    _in_head = False  # between the first bytes of a request and the end of its head
    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None  # for the first bytes, then for the end of the head
    _idle_since: float | None = None  # event-loop seconds since the last reply
    server_state: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = ReplyFlow(transport)
        self._linger_end = None  # also here, since an attribute of the object is read faster than one of its class
        if len(self.connections) > self.server_state.maximum:
            self._refuse(503, b"too many connections")
        else:
            self._deadline = self.loop.call_later(SILENT_SECONDS, self._give_up)

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None and not self._in_head:
            self._forget_deadline()
        self._idle_since = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            self._decline_upgrade(data[offered.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head:  # rare: nearly every head arrives in one piece
            self._wait_for_head(len(data))
        elif self._deadline is not None:
            self._forget_deadline()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse the current request again, without the upgrade that it offers. `rest` came after its head."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # llhttp treats it as an upgrade, too
            self._in_head = True  # no reply was begun
            self._refuse(405, b"CONNECT is not supported")
            return
        head = head_without_upgrade(method, self.url, self.parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(head + rest)

    def _wait_for_head(self, more_bytes: int) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += more_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, b"the head of the request is too long")
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        assert self._deadline is not None
        late_seconds = self.loop.time() - self._deadline.when()
        if late_seconds > LATE_SECONDS:  # the event loop did not run, and what arrived meanwhile was not read
            self._deadline = self.loop.call_later(late_seconds, self._give_up)
            return
        self._deadline = None
        self._refuse(408, b"the head of the request did not arrive in time")

    def _refuse(self, status: int, why: bytes) -> None:
        """Send an error reply before a request is complete, and close the connection."""
        lines = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        if self._in_head or status == 503:  # a client that has sent nothing gets no reply
            self.transport.write(STATUS_LINE[status] + lines % (len(why), why))
        self.transport.close()

    # httptools, called by `feed_data`

    def on_message_begin(self) -> None:
        """A request begins. Does what uvicorn's method does, and resets what is counted per request."""
        self._in_head, self._head_bytes = True, 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.scope = {  # type: ignore[typeddict-item]  # the rest is set at the end of the head
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]
            "root_path": self.root_path,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header, as uvicorn's method does, but ignores trailers, which are not headers (RFC 9110, 6.5.1)."""
        if self._in_head:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Like uvicorn's, but with `JoinedCycle`, and without WebSockets, a root path and a limit on requests."""
        self._in_head = False
        parser, scope = self.parser, self.scope
        if parser.should_upgrade():
            return  # `_decline_upgrade` follows
        version = parser.get_http_version()
        scope["method"] = parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"], scope["raw_path"], scope["query_string"] = _parts_of(self.url)
        fault = host_error(self.headers, version)
        app = self.app if fault is None else _refusing(fault)
        before = self.cycle
        cycle = self.cycle = JoinedCycle(self, keep_alive=version != "1.0" and parser.should_keep_alive())
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, app)
        else:  # a pipelined request
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))

    def _should_upgrade(self) -> bool:
        """Called by uvicorn for a request that offers an upgrade: whether to ignore what comes after its head."""
        return True

    def on_body(self, body: bytes) -> None:
        """Passes on a part of the body, as uvicorn's method does, but drops what arrives after the reply."""
        if self._linger_end is None:
            cycle = self.cycle
            if not (self.parser.should_upgrade() or cycle.response_complete):
                # A body that arrives at once is not copied.
                cycle.body = _joined(cycle.body, body) if cycle.body else body  # type: ignore[assignment]
                if len(cycle.body) > HIGH_WATER_LIMIT:
                    self.flow.pause_reading()
                cycle.message_event.set()
            return
        self._dropped_bytes += len(body)
        if self._dropped_bytes > LINGER_MAX_BYTES:
            self.transport.close()

    def on_message_complete(self) -> None:
        """Ends the body, as uvicorn's method does, and the time limit for what arrives after the reply."""
        cycle = self.cycle
        if not (self.parser.should_upgrade() or cycle.response_complete):
            cycle.more_body = False
            cycle.message_event.set()
        if self._linger_end is not None:
            self._linger_end.cancel()
            self._linger_end = None
            if not cycle.keep_alive:
                self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        cycle.scope.setdefault("extensions", {})[WIRE] = cast(Any, cycle)
        if self.server_state.leaving:
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    # Keep-alive: one timer covers many requests, since hardly any of them leaves the connection idle for so long.

    def _unset_keepalive_if_required(self) -> None:
        """Called by uvicorn when the connection ends."""
        self._idle_since = None

    def on_response_complete(self) -> None:
        """Like uvicorn's, except for the timer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self.cycle.more_body:
            self._dropped_bytes, self._linger_end = 0, self.loop.call_later(LINGER_SECONDS, self.transport.close)
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_later(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the end of the current request starts the timer again
        left_seconds = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_seconds > 0:
            self._look_later(left_seconds)
        else:
            super().timeout_keep_alive_handler()

    def _look_later(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        if self._linger_end is not None:
            self._linger_end.cancel()
            self._linger_end = None
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)
        flow = self.flow
        flow.write_paused = True  # for `Wire.coded_writer`; all else looks at `disconnected` first
        if isinstance(flow, ReplyFlow) and flow.when_lost is not None:
            flow.when_lost()
        if isinstance(self.cycle, JoinedCycle):
            self.cycle.gone()


def _refusing(why: str) -> ASGI3Application:
    """Return an application that answers a request with a 400, and closes its connection."""
    content = render_error(BadRequest(why))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", JSON_TYPE.encode()), (b"content-length", b"%d" % len(content)), (b"connection", b"close"),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": BadRequest.status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return cast(ASGI3Application, app)


def _joined(body: bytes | bytearray, part: bytes) -> bytearray:
    """The body with a further part. A `bytearray` grows in place."""
    joined = body if isinstance(body, bytearray) else bytearray(body)
    joined += part
    return joined


@lru_cache(maxsize=64)  # clients use a handful of URLs
def _parts_of(url: bytes) -> tuple[str, bytes, bytes]:
    """Split a URL into the decoded path, the raw path and the query."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""
