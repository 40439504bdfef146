"""One HTTP/1.1 connection: an `asyncio.Protocol` that feeds llhttp and carries one request at a time.

The event loop calls the protocol's methods with received bytes, and llhttp calls the `on_...` methods from there. The
caller of `send_request` then reads the body by `read` or `stream_to`. Between requests a `ConnectionPool` keeps the
connection. Flow control: beyond MAX_BUFFERED_BYTES of unread body, the socket is not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol, cast

import httptools
import httpx2

MAX_HEAD_BYTES = 64 * 1024
MAX_BUFFERED_BYTES = 256 * 1024  # received but not yet read by the caller; beyond it the socket is not read
ONE_WRITE_BYTES = 64 * 1024  # up to this size, copying head and body together is cheaper than writing twice


class ConnectionPool(Protocol):
    """What a connection needs of the pool that owns it."""

    def put_idle(self, connection: Connection) -> None:
        """The response has ended, and the connection can carry the next request."""

    def discard(self, connection: Connection) -> None:
        """The connection was closed, whether or not it was idle."""


class Connection(asyncio.Protocol):
    """An open connection, until it fails or is released before the end of a response.

    Only one task may use it at a time: `send_request`, then `read` until it returns b"", then `release`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: ConnectionPool) -> None:
        self.loop = loop
        self._pool = pool
        self._parts: list[bytes] = []  # of the body, received but not yet read
        self.on_body = self._parts.append  # called by httptools
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._sink: Callable[[bytes], bool] | None = None
        self._sink_failure: Exception | None = None
        self._reset()
        self.complete = True  # no request yet

    def _reset(self) -> None:
        self.status = 0  # 0 until the whole head has arrived
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_received = False  # a byte of the response has arrived
        self.complete = False
        self._keep_alive = False
        self._failure: httpx2.TransportError | None = None
        self._head_bytes = 0
        self._parts.clear()
        self._waiting_bytes = 0

    async def send_request(self, head: bytes, body: bytes, read_timeout_seconds: float | None) -> None:
        """Send a request and wait for the head of the response. On failure, the connection is closed."""
        self._reset()
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
        """The next bytes of the body, b"" at its end. Bytes that arrived before a failure are returned first."""
        while not self._parts:
            if self.complete:
                return b""
            await self._wait(timeout_seconds)
        return self._take()

    async def stream_to(self, sink: Callable[[bytes], bool], timeout_seconds: float | None) -> bool:
        """Pass the rest of the body to `sink`, each piece in the callback that received it. This wakes no task.

        True at the end of the body, False if `sink` returned False. An exception of `sink` is raised here.
        """
        if self._parts and not sink(self._take()):
            return False
        self._sink = sink
        try:
            while self._sink is not None and not self.complete and self._sink_failure is None:
                await self._wait(timeout_seconds)
            if self._sink_failure is not None:  # even if the body is complete
                raise self._sink_failure
            return self._sink is not None
        finally:
            self._sink = self._sink_failure = None

    def _take(self) -> bytes:
        data = b"".join(self._parts)  # does not copy if there is only one part
        self._parts.clear()
        self._waiting_bytes = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def _hand_over(self, sink: Callable[[bytes], bool]) -> None:
        """Pass received bytes to the sink. Wake the waiting task if the sink has enough or failed, or at the end."""
        try:
            if not sink(self._take()):
                self._sink = None
        except Exception as error:  # noqa: BLE001 - `stream_to` raises it, where a caller can handle it
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
            failure = httpx2.ReadTimeout(f"no data received for {timeout_seconds:g} s")
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
        """Close the connection at once, without flushing what is not yet sent."""
        self._keep_alive = False
        self._transport.abort()

    def release(self) -> None:
        """End the request: give the connection back to the pool if the response has ended, otherwise close it."""
        if self.complete and self._keep_alive and not self._transport.is_closing():
            self._parts.clear()
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._pool.put_idle(self)
        else:
            self.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        """asyncio: feed the parser, then wake or call the reader. Pauses the socket if too much is unread."""
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx2.RemoteProtocolError(f"the response is not HTTP/1.1: {error}"))
            return
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(httpx2.RemoteProtocolError(f"the response head exceeds {MAX_HEAD_BYTES} bytes"))
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
        """asyncio: the connection has ended. Completes a body that has no other end; otherwise a failure."""
        self._pool.discard(self)
        if self.status and error is None and not self._failure and self._ends_with_the_connection():
            self.complete = True
        self._fail(httpx2.ReadError(f"the connection ended before the response did{f': {error}' if error else ''}"))

    def _ends_with_the_connection(self) -> bool:
        """Whether only the end of the connection ends the body (RFC 9112, 6.3)."""
        return not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # httptools, called by `feed_data`

    def on_message_begin(self) -> None:
        """httptools: a response begins. Rejects one without a request."""
        if self.complete:
            self._reject("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header line. Ignores trailers."""
        if not self.status:  # otherwise it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """httptools: the head is complete. Skips informational responses."""
        status = self._parser.get_status_code()
        if status == 101:
            self._reject("a protocol upgrade")
        if status < 200:  # informational; the response follows
            self.headers.clear()
            return
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """httptools: the response has ended."""
        self.complete = self.status != 0

    def _reject(self, reason: str) -> NoReturn:
        raise httptools.HttpParserError(reason)
