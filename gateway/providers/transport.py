"""HTTP/1.1 to the servers behind the gateway: an httpx2 transport on asyncio's protocols and llhttp.

It is what a gateway needs of HTTP and no more: kept-alive connections with a bound per origin, bodies passed on as the
pieces in which they came, never decompressed, and a connection that is closed in the moment in which nobody listens
to it any more. CPU per small JSON exchange, measured in one process: 14 us by `send`, 36 us with httpx2's request and
response around it, 87 us by aiohttp, 485 us by httpx2's own transport.

What may be relied on:

* Failures stay apart: `ConnectError`, `ConnectTimeout`, `PoolTimeout`, `ReadTimeout`, `ReadError` (the connection
  broke or ended before the answer did), `RemoteProtocolError` (the answer is not HTTP).
* Cancelling whoever waits, or closing a response before its end, closes the connection at once.
* A request is sent twice in one case only: on a kept-alive connection that ended before a byte of the answer came,
  because the server closed it while the request was on its way.

HEAD, upgrades, proxies and redirects are not spoken; request bodies are read whole before they are sent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NoReturn, cast

import httptools
import httpx2

MAX_CONNECTIONS_PER_ORIGIN = 16_384  # a backstop: deployments have their own, smaller `max_concurrency`
POOL_TIMEOUT_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 5.0
KEEPALIVE_SECONDS = 4.0  # below the 5 s after which uvicorn, and with it vLLM and SGLang, closes an idle connection
STALE_SECONDS = 0.002  # an end that comes sooner after a request had been on its way before it
MAX_HEAD_BYTES = 64 * 1024
MAX_BUFFERED_BYTES = 256 * 1024  # received but not yet asked for; beyond it the socket is not read
NO_TIMEOUTS: Mapping[str, float | None] = MappingProxyType({})
ONE_WRITE_BYTES = 64 * 1024  # up to here it is cheaper to copy head and body together than to write twice


class HTTPTransport(httpx2.AsyncBaseTransport):
    """Connections to any number of origins, each with its own bound: a server that hangs takes none from the others.

    The timeouts are defaults; a request's `timeout` extension (connect, read, pool; httpx's) goes before them. There
    is no default read timeout: how long a model may think is policy, and whoever enforces it cancels.
    """

    def __init__(
        self,
        *,
        max_connections_per_origin: int = MAX_CONNECTIONS_PER_ORIGIN,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
        pool_timeout_seconds: float = POOL_TIMEOUT_SECONDS,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._max_connections_per_origin = max_connections_per_origin
        self._connect_timeout_seconds = connect_timeout_seconds
        self._pool_timeout_seconds = pool_timeout_seconds
        self._keepalive_seconds = keepalive_seconds
        self._ssl_context = ssl_context
        self._origins: dict[tuple[str, str, int | None], Origin] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """For whoever comes with httpx2's objects. They cost more than the exchange itself: see `send`."""
        if request.method == "HEAD":
            raise httpx2.LocalProtocolError("HEAD is not supported")
        head = b"%b %b HTTP/1.1\r\n" % (request.method.encode("ascii"), request.url.raw_path)
        head += header_lines(request.headers.raw)
        timeouts = request.extensions.get("timeout", NO_TIMEOUTS)
        answer = await self.send(self.origin(request.url), head, await request.aread(), timeouts)
        return httpx2.Response(answer.status, headers=answer.headers, stream=answer)

    async def send(
        self, origin: Origin, head: bytes, body: bytes, timeouts: Mapping[str, float | None] = NO_TIMEOUTS
    ) -> Answer:
        """One exchange, up to the head of the answer; the caller closes it.

        `head` is the request line and the header lines, each with its CRLF, `host` and `content-length` among them.
        """
        read_timeout_seconds = timeouts.get("read")
        await origin.take_slot(timeouts.get("pool", self._pool_timeout_seconds))
        try:
            if (reused := origin.take_idle()) is not None:
                asked_at = reused.loop.time()
                try:
                    await reused.exchange(head, body, read_timeout_seconds)
                    return Answer(reused, origin, read_timeout_seconds)
                except httpx2.ReadError:
                    # A server that closes later may have begun to work: to ask once more is then another attempt, with
                    # a bill of its own, and the caller's to make (RFC 9110, 9.2.2).
                    late = reused.loop.time() > asked_at + STALE_SECONDS
                    if reused.answered or (late and not head.startswith(b"GET ")):
                        raise
            fresh = await origin.connect(timeouts.get("connect", self._connect_timeout_seconds))
            await fresh.exchange(head, body, read_timeout_seconds)
            return Answer(fresh, origin, read_timeout_seconds)
        except BaseException:  # cancellation too: the slot is given back on every way out
            origin.give_slot()
            raise

    def origin(self, url: httpx2.URL) -> Origin:
        """Where a URL leads. The same object for the same scheme, host and port, as long as the transport lives."""
        key = (url.scheme, url.host, url.port)
        if (origin := self._origins.get(key)) is None:
            if url.scheme not in ("http", "https") or not url.host:
                raise httpx2.UnsupportedProtocol(f"not an http or https URL: {url}")
            if url.scheme == "https" and self._ssl_context is None:
                self._ssl_context = ssl.create_default_context()
            origin = self._origins[key] = Origin(
                url.host,
                url.port or (443 if url.scheme == "https" else 80),
                self._ssl_context if url.scheme == "https" else None,
                self._max_connections_per_origin,
                self._keepalive_seconds,
            )
        return origin

    async def aclose(self) -> None:
        """Closes the idle connections; those in use are closed by whoever opened them."""
        for origin in self._origins.values():
            origin.close_idle()
        await asyncio.sleep(0)  # in which the event loop closes their sockets


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers on the wire. Raises `LocalProtocolError` where a value could end its line and begin another."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    text = b"".join(lines)
    if text.count(b"\n") != len(lines) or text.count(b"\r") != len(lines):
        raise httpx2.LocalProtocolError("a header holds a line break")
    return text


class Origin:
    """The connections to one scheme, host and port: the idle ones, and a bound on those in use."""

    def __init__(
        self, host: str, port: int, ssl_context: ssl.SSLContext | None, max_connections: int, keepalive_seconds: float
    ) -> None:
        self._host = host
        self._port = port
        self._ssl_context = ssl_context
        self._keepalive_seconds = keepalive_seconds
        self._slots = max_connections  # that are free
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a slot, first come, first served
        self._idle: dict[_Connection, float] = {}  # since when (loop seconds); the youngest last

    async def take_slot(self, timeout_seconds: float | None) -> None:
        if self._slots:
            self._slots -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            async with asyncio.timeout(timeout_seconds):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():  # in the very moment in which the waiting ended
                self.give_slot()
            if isinstance(error, TimeoutError):
                raise httpx2.PoolTimeout(f"every connection to {self._host}:{self._port} is in use") from error
            raise

    def give_slot(self) -> None:
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                return
        self._slots += 1

    def take_idle(self) -> _Connection | None:
        """The youngest, because it is the least likely to be closed by the server just now."""
        if not self._idle:
            return None
        connection, since = self._idle.popitem()
        if connection.loop.time() - since < self._keepalive_seconds:
            return connection
        connection.abort()
        self.close_idle()  # the others are older still
        return None

    def keep(self, connection: _Connection) -> None:
        self._idle[connection] = connection.loop.time()

    def forget(self, connection: _Connection) -> None:
        self._idle.pop(connection, None)

    def close_idle(self) -> None:
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    async def connect(self, timeout_seconds: float | None) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_seconds):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self), self._host, self._port, ssl=self._ssl_context
                )
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(f"no connection to {self._host}:{self._port} in time") from error
        except OSError as error:  # TLS and name resolution too
            raise httpx2.ConnectError(f"no connection to {self._host}:{self._port}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time.

    The event loop calls the protocol's methods and the parser's `on_...`; whoever has the exchange calls `exchange`,
    then `read` until it gives nothing. One waits at a time, so one future is enough.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: Origin) -> None:
        self.loop = loop
        self._origin = origin
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

    async def pour(self, sink: Callable[[bytes], bool], timeout_seconds: float | None) -> bool:
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where it can be answered: in `pour`
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
            self._origin.keep(self)
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
        self._origin.forget(self)
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


class Answer(httpx2.AsyncByteStream):
    """An answer whose head is in. Iterating gives the body as the pieces in which it came.

    At its end, or when it is closed, connection and slot are given back.
    """

    def __init__(self, connection: _Connection, origin: Origin, read_timeout_seconds: float | None) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self._connection = connection
        self._origin = origin
        self._read_timeout_seconds = read_timeout_seconds
        self._closed = False

    def header(self, name: bytes) -> bytes:
        """The first value of a header, whose name is given in lower case; b"" where there is none."""
        for given, value in self.headers:
            if given.lower() == name:
                return value
        return b""

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> bytes:
        if not self._closed:
            try:
                data = await self._connection.read(self._read_timeout_seconds)
            except BaseException:
                self._close()
                raise
            if data:
                return data
            self._close()
        raise StopAsyncIteration

    async def rest(self, max_bytes: int) -> bytes:
        """What is left of the body at its end, cut off behind `max_bytes`."""
        parts: list[bytes] = []
        room_bytes = max_bytes
        try:
            while not self._closed and room_bytes >= 0:
                part = await self._connection.read(self._read_timeout_seconds)
                if not part:
                    self._close()
                parts.append(part)
                room_bytes -= len(part)
        except BaseException:
            self._close()
            raise
        return b"".join(parts)[:max_bytes]

    async def pour(self, sink: Callable[[bytes], bool]) -> bool:
        """See `Reply.pour`; the pieces are those in which the body came."""
        if self._closed:
            return True
        try:
            ended = await self._connection.pour(sink, self._read_timeout_seconds)
        except BaseException:
            self._close()
            raise
        if ended:
            self._close()
        return ended

    async def aclose(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.release()
            self._origin.give_slot()
