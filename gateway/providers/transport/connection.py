"""One connection: an `asyncio.Protocol` that feeds llhttp, and carries one exchange at a time.

It is apart from its origin, since it knows nothing of other connections: only that somebody keeps it between exchanges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol, cast

import httptools
import httpx2

MAX_HEAD_BYTES = 64 * 1024
MAX_BUFFERED_BYTES = 256 * 1024  # received but not yet asked for; beyond it the socket is not read
ONE_WRITE_BYTES = 64 * 1024  # up to here it is cheaper to copy head and body together than to write twice


class ConnectionPool(Protocol):
    """Whose connections they are."""

    def keep(self, connection: Connection) -> None:
        """Its exchange has come to its end, and it may carry the next one."""

    def forget(self, connection: Connection) -> None:
        """It is closed, whether it was kept or not."""


class Connection(asyncio.Protocol):
    """Open until it fails, or is released with its answer unread.

    The event loop calls the protocol's methods and the parser's `on_...`; whoever has the exchange calls `exchange`,
    then `read` until it gives nothing. One waits at a time, so one future is enough.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, keeper: ConnectionPool) -> None:
        self.loop = loop
        self._keeper = keeper
        self._parts: list[bytes] = []  # of the body, not yet asked for
        self.on_body = self._parts.append  # httptools calls it
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._sink: Callable[[bytes], bool] | None = None
        self._sink_failure: Exception | None = None
        self._begin()
        self.complete = True  # no exchange yet

    def _begin(self) -> None:
        self.status = 0  # 0 until the whole head is in
        self.headers: list[tuple[bytes, bytes]] = []
        self.answered = False  # some byte of the answer came
        self.complete = False
        self._keep_alive = False
        self._failure: httpx2.TransportError | None = None
        self._head_bytes = 0
        self._parts.clear()
        self._waiting_bytes = 0

    async def exchange(self, head: bytes, body: bytes, read_timeout_seconds: float | None) -> None:
        """Send the request, wait for the head of the answer. The connection is closed if that fails."""
        self._begin()
        if self._transport.is_closing():
            self._fail(httpx2.ReadError("the server closed the connection"))
        if len(body) <= ONE_WRITE_BYTES:
            self._transport.write(b"%b\r\n%b" % (head, body))
        else:
            self._transport.write(head + b"\r\n")
            self._transport.write(body)
        while not self.status:
            await self._wait(read_timeout_seconds)

    async def read(self, timeout_seconds: float | None) -> bytes:
        """The next bytes of the body, b"" at its end. What came before a failure is given before it is raised."""
        while not self._parts:
            if self.complete:
                return b""
            await self._wait(timeout_seconds)
        return self._take()

    async def stream_to(self, sink: Callable[[bytes], bool], timeout_seconds: float | None) -> bool:
        """Give `sink` the rest of the body, each piece in the callback in which it came; no task is woken for it.

        True at the end of the body, False when `sink` returned False. What `sink` raises is raised here.
        """
        if self._parts and not sink(self._take()):
            return False
        self._sink = sink
        try:
            while self._sink is not None and not self.complete and self._sink_failure is None:
                await self._wait(timeout_seconds)
            if self._sink_failure is not None:  # also where it took the last piece of a body that is complete
                raise self._sink_failure
            return self._sink is not None
        finally:
            self._sink = self._sink_failure = None

    def _take(self) -> bytes:
        data = b"".join(self._parts)  # which is the one part itself, where there is one
        self._parts.clear()
        self._waiting_bytes = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def _hand_over(self, sink: Callable[[bytes], bool]) -> None:
        """Pour what has come; wake the one who waits if that was enough, went wrong, or was the end."""
        try:
            if not sink(self._take()):
                self._sink = None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where it can be answered: in `stream_to`
            self._sink_failure = error
            self.abort()
        if self._sink is None or self.complete or self._sink_failure is not None:
            self._wake()

    async def _wait(self, timeout_seconds: float | None) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = waiter = self.loop.create_future()
        timer = None
        if timeout_seconds is not None:
            failure = httpx2.ReadTimeout(f"nothing came for {timeout_seconds:g} s")
            timer = self.loop.call_later(timeout_seconds, self._fail, failure)
        try:
            await waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: httpx2.TransportError) -> None:
        if not self.complete and self._failure is None:
            self._failure = failure
        self.abort()
        self._wake()

    def abort(self) -> None:
        self._keep_alive = False
        self._transport.abort()

    def release(self) -> None:
        """The exchange is over: kept for the next one if it came to its end, closed if not."""
        if self.complete and self._keep_alive and not self._transport.is_closing():
            self._parts.clear()
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._keeper.keep(self)
        else:
            self.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx2.RemoteProtocolError(f"the answer is not HTTP/1.1: {error}"))
            return
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(httpx2.RemoteProtocolError(f"the head of the answer is over {MAX_HEAD_BYTES} bytes"))
            return
        if self._sink is not None and self._parts:
            self._hand_over(self._sink)
            return
        self._waiting_bytes += len(data)
        if self._waiting_bytes > MAX_BUFFERED_BYTES and not self._paused and not self.complete:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._keeper.forget(self)
        if self.status and error is None and not self._failure and self._ends_with_the_connection():
            self.complete = True
        self._fail(httpx2.ReadError(f"the connection ended before the answer did{f': {error}' if error else ''}"))

    def _ends_with_the_connection(self) -> bool:
        return not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # httptools, called by `feed_data`

    def on_message_begin(self) -> None:
        if self.complete:
            self._refuse("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 101:
            self._refuse("a change of protocol")
        if status < 200:  # informational; the answer follows
            self.headers.clear()
            return
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self.complete = self.status != 0

    def _refuse(self, what: str) -> NoReturn:
        raise httptools.HttpParserError(what)
