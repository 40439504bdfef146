"""uvicorn's HTTP/1.1, but for how a reply is written, which is most of what uvicorn costs a gateway.

The head is checked as a whole instead of header by header, and leaves together with the first bytes of the body: one
system call for a short reply, and no packet that holds nothing but a head. Everything else is uvicorn's.
"""

from __future__ import annotations

from typing import Any, cast

from uvicorn._types import ASGI3Application, ASGISendEvent, HTTPResponseBodyEvent, HTTPResponseStartEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

_BODILESS_STATUSES = frozenset({204, 304})


class JoinedCycle(RequestResponseCycle):
    """One request and its reply. What is rare (HEAD, replies without a body) goes uvicorn's way."""

    _head: bytes | None = None  # until the first bytes of the body are there
    _joins = False

    async def send(self, message: ASGISendEvent) -> None:
        if self.response_started and not self._joins:
            await super().send(message)
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            if self._begins_usually(message):
                self._start(cast(HTTPResponseStartEvent, message))
            else:
                await super().send(message)
        elif message["type"] == "http.response.body" and not self.response_complete:
            self._continue(message)
        else:
            await super().send(message)  # which says what is wrong

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
        super()._start_asgi_task(cycle, app)
