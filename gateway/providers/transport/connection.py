"""One HTTP/1.1 connection: an `asyncio.Protocol` that parses responses with llhttp, for one request at a time.

The event loop passes received bytes to the protocol's methods, and llhttp calls the `on_...` methods from there. After
`send_request`, the caller reads the body with `read` or `stream_to`. Between requests, a `ConnectionPool` keeps the
connection. While more than MAX_BUFFERED_BYTES of the body are unread, the socket is not read (flow control).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import NoReturn, Protocol, cast

import httptools
import httpx2

from gateway.providers.native_relay.relay import RelayedStream, StreamRelay
from gateway.providers.text_events import DirectText

MAX_HEAD_BYTES = 64 * 1024
MAX_BUFFERED_BYTES = 256 * 1024  # the socket is not read while the caller has more unread bytes
ONE_WRITE_BYTES = 64 * 1024  # up to this size, copying head and body together is cheaper than writing twice


class ConnectionPool(Protocol):
    """Interface of the pool that owns a connection. The connection calls it."""

    relay: StreamRelay | None  # passes on the texts of streams, if it is available

    def put_idle(self, connection: Connection) -> None:
        """Take back a connection whose response has ended. The connection can send the next request."""

    def discard(self, connection: Connection) -> None:
        """Remove a connection that was closed, whether or not it was idle."""


class Connection(asyncio.Protocol):
    """A connection that stays open until it fails or is released before the end of a response.

    Only one task may use a connection at a time. It calls `send_request`, then `read` until that returns b"", then
    `release`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: ConnectionPool) -> None:
        self.loop = loop
        self._pool = pool
        self._parts: list[bytes] = []  # pieces of the body that are received but not yet read
        self.on_body = self._parts.append  # called by httptools
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._sink: Callable[[bytes], bool] | None = None
        self._direct: DirectText | None = None
        self.relayed: RelayedStream | None = None
        self._take_chunk: Callable[[bytes], bool] | None = None  # `_direct.take`, if the last read ended with a chunk
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
        """Send a request, and wait for the head of the response. If that fails, the connection is closed."""
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
        """Return the next bytes of the body, or b"" at its end. A failure is raised after the bytes before it."""
        while not self._parts:
            if self.complete:
                return b""
            await self._wait(timeout_seconds)
        return self.take()

    async def stream_to(
        self,
        sink: Callable[[bytes], bool],
        timeout_seconds: float | None,
        direct: DirectText | None = None,
    ) -> bool:
        """Pass the rest of the body to `sink`, each piece in the event-loop callback that received it.

        No task is woken for a piece. Returns True at the end of the body, and False if `sink` returned False. Raises
        any exception that `sink` raises.

        `direct` gets a read first that begins where a chunk of the transfer coding begins. After such a read, the
        pool's relay may read the socket instead, until something else than such chunks arrives.
        """
        if self._parts and not sink(self.take()):
            return False
        self._sink, self._direct = sink, direct
        if direct is not None and self._pool.relay is not None:
            self.relayed = RelayedStream(self._pool.relay, self, self._transport, direct)
        try:
            while self._sink is not None and not self.complete and self._sink_failure is None:
                await self._wait(timeout_seconds)
            if self._sink_failure is not None:  # even if the body is complete
                raise self._sink_failure
            return self._sink is not None
        finally:
            if self.relayed is not None:
                self.relayed.end()
                self.relayed = None
            self._sink = self._sink_failure = self._direct = self._take_chunk = None

    @property
    def is_between_chunks(self) -> bool:
        """Whether `direct` has taken the last read, or may take the next one."""
        return self._take_chunk is not None and not self._paused

    def take(self) -> bytes:
        """Return what has been received of the body and not been read yet."""
        data = b"".join(self._parts)  # does not copy if there is only one part
        self._parts.clear()
        self._waiting_bytes = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

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
        """Close the connection at once, without sending the bytes that are still buffered."""
        self._keep_alive = False
        self._transport.abort()

    def release(self) -> None:
        """End the request. Returns the connection to the pool if the response has ended, otherwise closes it."""
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
        """Called by asyncio when the connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from this class

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when bytes arrive. Feeds the parser, and wakes or calls the reader.

        A sink gets the bytes at once. The task that waits for its end is woken only then, or if it stopped or failed.
        Pauses the socket if too many bytes are unread.
        """
        if (take := self._take_chunk) is not None:
            if take(data):
                if self.relayed is not None:
                    self.relayed.read_taken()
                return  # the parser is where it was, between two chunks
            self._take_chunk = None
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx2.RemoteProtocolError(f"the response is not HTTP/1.1: {error}"))
            return
        if (sink := self._sink) is not None and (parts := self._parts):
            body, direct = parts.pop(), self._direct
            if parts:  # never more than the socket's last bytes, so the socket is not paused
                body = b"".join([*parts, body])
                parts.clear()
                direct = None
            try:
                if not sink(body):
                    self._sink = None
                elif not self.complete:
                    if direct is not None and data == b"%x\r\n%b\r\n" % (len(body), body):
                        self._take_chunk = direct.take
                    return
            except Exception as error:  # noqa: BLE001 - `stream_to` raises it, where a caller can handle it
                self._sink_failure = error
                self.abort()
            self._wake()
            return
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(httpx2.RemoteProtocolError(f"the response head exceeds {MAX_HEAD_BYTES} bytes"))
            return
        self._waiting_bytes += len(data)
        if self._waiting_bytes > MAX_BUFFERED_BYTES and not self._paused and not self.complete:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio at the end of the connection. It is an error unless the body ends with the connection."""
        if self.relayed is not None:
            self.relayed.end()
        self._pool.discard(self)
        if self.status and error is None and not self._failure and self._ends_with_the_connection():
            self.complete = True
        if isinstance(error, ssl.SSLError) and not self.has_received:
            # With TLS 1.3 a server refuses a client's certificate after the handshake, where the response would begin.
            self._fail(httpx2.ConnectError(f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"))
        self._fail(httpx2.ReadError(f"the connection ended before the response did{f': {error}' if error else ''}"))
        del self._parser  # it refers to this object, which only the garbage collector would free

    def _ends_with_the_connection(self) -> bool:
        """Whether the body has no length and ends with the connection (RFC 9112, 6.3)."""
        return not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # httptools, called by `feed_data`

    def on_message_begin(self) -> None:
        """Called by httptools when a response begins. Rejects a response without a request."""
        if self.complete:
            self._reject("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools for each header. Ignores trailers."""
        if not self.status:  # with a status, this header is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by httptools when the head is complete. Skips informational responses."""
        status = self._parser.get_status_code()
        if status == 101:
            self._reject("a protocol upgrade")
        if status < 200:  # informational; the response follows
            self.headers.clear()
            return
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """Called by httptools when the response has ended."""
        self.complete = self.status != 0

    def _reject(self, reason: str) -> NoReturn:
        raise httptools.HttpParserError(reason)
