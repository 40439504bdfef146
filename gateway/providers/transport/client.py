"""The face of the transport: a request goes out by `send`, and its `HTTPResponse` is read piece by piece."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import httpx2

from gateway.providers.transport.connection import Connection
from gateway.providers.transport.origin_pool import OriginPool

MAX_CONNECTIONS_PER_ORIGIN = 16_384  # a backstop: deployments have their own, smaller `max_concurrency`
POOL_TIMEOUT_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 5.0
KEEPALIVE_SECONDS = 4.0  # below the 5 s after which uvicorn, and with it vLLM and SGLang, closes an idle connection
STALE_SECONDS = 0.002  # an end that comes sooner after a request had been on its way before it
NO_TIMEOUTS: Mapping[str, float | None] = MappingProxyType({})


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
        self._origins: dict[tuple[str, str, int | None], OriginPool] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """For whoever comes with httpx2's objects. They cost more than the exchange itself: see `send`."""
        if request.method == "HEAD":
            raise httpx2.LocalProtocolError("HEAD is not supported")
        head = b"%b %b HTTP/1.1\r\n" % (request.method.encode("ascii"), request.url.raw_path)
        head += header_lines(request.headers.raw)
        timeouts = request.extensions.get("timeout", NO_TIMEOUTS)
        answer = await self.send(self.pool(request.url), head, await request.aread(), timeouts)
        return httpx2.Response(answer.status, headers=answer.headers, stream=answer)

    async def send(
        self, origin: OriginPool, head: bytes, body: bytes, timeouts: Mapping[str, float | None] = NO_TIMEOUTS
    ) -> HTTPResponse:
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
                    return HTTPResponse(reused, origin, read_timeout_seconds)
                except httpx2.ReadError:
                    # A server that closes later may have begun to work: to ask once more is then another attempt, with
                    # a bill of its own, and the caller's to make (RFC 9110, 9.2.2).
                    late = reused.loop.time() > asked_at + STALE_SECONDS
                    if reused.answered or (late and not head.startswith(b"GET ")):
                        raise
            fresh = await origin.connect(timeouts.get("connect", self._connect_timeout_seconds))
            await fresh.exchange(head, body, read_timeout_seconds)
            return HTTPResponse(fresh, origin, read_timeout_seconds)
        except BaseException:  # cancellation too: the slot is given back on every way out
            origin.give_slot()
            raise

    def pool(self, url: httpx2.URL) -> OriginPool:
        """Where a URL leads. The same object for the same scheme, host and port, as long as the transport lives."""
        key = (url.scheme, url.host, url.port)
        if (origin := self._origins.get(key)) is None:
            if url.scheme not in ("http", "https") or not url.host:
                raise httpx2.UnsupportedProtocol(f"not an http or https URL: {url}")
            if url.scheme == "https" and self._ssl_context is None:
                self._ssl_context = ssl.create_default_context()
            origin = self._origins[key] = OriginPool(
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


class HTTPResponse(httpx2.AsyncByteStream):
    """An answer whose head is in. Iterating gives the body as the pieces in which it came.

    At its end, or when it is closed, connection and slot are given back.
    """

    def __init__(self, connection: Connection, origin: OriginPool, read_timeout_seconds: float | None) -> None:
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

    def __aiter__(self) -> HTTPResponse:
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

    async def stream_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Give `sink` the rest of the body, as `Connection.stream_to` does. False if `sink` returned False."""
        if self._closed:
            return True
        try:
            ended = await self._connection.stream_to(sink, self._read_timeout_seconds)
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


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers on the wire. Raises `LocalProtocolError` where a value could end its line and begin another."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    text = b"".join(lines)
    if text.count(b"\n") != len(lines) or text.count(b"\r") != len(lines):
        raise httpx2.LocalProtocolError("a header holds a line break")
    return text
