"""uvicorn's HTTP/1.1, but for how a reply is written, which is most of what uvicorn costs a gateway.

The head is checked as a whole instead of header by header, and leaves together with the first bytes of the body: one
system call for a short reply, and no packet that holds nothing but a head. Everything else is uvicorn's.

Beside ASGI, whose every step is a coroutine, an application finds a `Wire` in the scope's extensions, under `WIRE`: it
writes at once where there is room, and tells of the client's leaving without a task that listens for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn._types import ASGI3Application, ASGISendEvent, HTTPResponseBodyEvent, HTTPResponseStartEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.replies import WIRE

_BODILESS_STATUSES = frozenset({204, 304})


class JoinedCycle(RequestResponseCycle):
    """One request and its reply. What is rare (HEAD, replies without a body) goes uvicorn's way."""

    _head: bytes | None = None  # until the first bytes of the body are there
    _joins = False
    _tell: Callable[[], None] | None = None

    async def send(self, message: ASGISendEvent) -> None:
        if self.put(message):
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.put(message):
            await super().send(message)  # its way; or it says what is wrong

    def put(self, message: ASGISendEvent) -> bool:
        """Send a message without waiting. False: nothing was sent; `send` it, which waits if it has to."""
        if self.disconnected:
            return True
        if self.flow.write_paused:
            return False
        if not self.response_started:
            if not self._begins_usually(message):
                return False
            self._start(cast(HTTPResponseStartEvent, message))
            return True
        if not self._joins or self.response_complete or message["type"] != "http.response.body":
            return False
        self._continue(message)
        return True

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """`tell` is called when the client leaves before the reply's end; None: nobody wants to know any more."""
        self._tell = tell
        self.flow.resume_reading()  # or its leaving would not be read
        if tell is not None and self.disconnected:
            tell()

    def gone(self) -> None:
        if self.disconnected and self._tell is not None:
            self._tell()

    def _begins_usually(self, message: Any) -> bool:
        return (
            message["type"] == "http.response.start"
            and message["status"] not in _BODILESS_STATUSES
            and self.scope["method"] != "HEAD"
        )

    def _start(self, message: HTTPResponseStartEvent) -> None:
        headers = [*self.default_headers, *message.get("headers", ())]
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        if head.count(b"\n") != len(headers) or head.count(b"\r") != len(headers) or b"\0" in head:
            raise RuntimeError("Invalid HTTP header.")
        self.chunked_encoding = True
        for name, value in headers:
            if name == b"content-length":
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
        if self.chunked_encoding:
            head += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive and b"connection: close\r\n" not in head:
            head += b"connection: close\r\n"
        self._head = STATUS_LINE[message["status"]] + head + b"\r\n"
        self.response_started = self._joins = True
        self.waiting_for_100_continue = False

    def _continue(self, message: HTTPResponseBodyEvent) -> None:
        body = message.get("body", b"")
        last = not message.get("more_body", False)
        if self.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if last:
                data += b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (last and self.expected_content_length):
                raise RuntimeError("The reply is not as long as its content-length says.")
            data = body
        if self._head is not None:
            data, self._head = self._head + data, None
        self.transport.write(data)
        if last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class JoinedProtocol(HttpToolsProtocol):
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        # uvicorn has no place to name the class; nothing has run in the cycle yet, and a class adds no state.
        cycle.__class__ = JoinedCycle
        cycle.scope.setdefault("extensions", {})[WIRE] = cast(Any, cycle)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(self.cycle, JoinedCycle):
            self.cycle.gone()
