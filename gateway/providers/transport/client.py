"""The transport's interface: `HTTPTransport.send` sends a request and returns an `HTTPResponse`, read piece by piece.

`send` takes a slot of the origin's pool, then an idle connection or a new one. If a reused connection turns out to be
closed by the server, it sends the request once more on a new one. The response gives back connection and slot at its
end, or when it is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import httpx2

from gateway.providers.transport.connection import Connection
from gateway.providers.transport.origin_pool import OriginPool

MAX_CONNECTIONS_PER_ORIGIN = 16_384  # a safety limit: deployments have their own, smaller `max_concurrency`
POOL_TIMEOUT_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 5.0
KEEPALIVE_SECONDS = 4.0  # below the 5 s after which uvicorn, and with it vLLM and SGLang, closes an idle connection
STALE_SECONDS = 0.002  # if a reused connection ends this soon after the request, the server had closed it before
NO_TIMEOUTS: Mapping[str, float | None] = MappingProxyType({})


class HTTPTransport(httpx2.AsyncBaseTransport):
    """Connections to any number of origins. Each origin has its own bound, so a hanging server does not affect others.

    The timeouts are defaults. httpx's `timeout` extension of a request (connect, read, pool) overrides them. There is
    no default read timeout: the policy bounds how long a model may take, and the code that enforces it cancels.
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
        self._pools: dict[tuple[str, str, int | None], OriginPool] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """httpx2's transport interface. Its request and response objects cost more CPU than the request: see `send`."""
        if request.method == "HEAD":
            raise httpx2.LocalProtocolError("HEAD is not supported")
        head = b"%b %b HTTP/1.1\r\n" % (request.method.encode("ascii"), request.url.raw_path)
        head += header_lines(request.headers.raw)
        timeouts = request.extensions.get("timeout", NO_TIMEOUTS)
        response = await self.send(self.pool(request.url), head, await request.aread(), timeouts)
        return httpx2.Response(response.status, headers=response.headers, stream=response)

    async def send(
        self, pool: OriginPool, head: bytes, body: bytes, timeouts: Mapping[str, float | None] = NO_TIMEOUTS
    ) -> HTTPResponse:
        """Send a request and return once the head of the response has arrived. The caller closes the response.

        `head` is the request line and the header lines, each with its CRLF. They include `host` and `content-length`.
        """
        read_timeout_seconds = timeouts.get("read")
        await pool.take_slot(timeouts.get("pool", self._pool_timeout_seconds))
        try:
            if (reused := pool.take_idle()) is not None:
                sent_at = reused.loop.time()
                try:
                    await reused.send_request(head, body, read_timeout_seconds)
                    return HTTPResponse(reused, pool, read_timeout_seconds)
                except httpx2.ReadError:
                    # If the server closes later than this, it may have begun to work. Then a second request would be
                    # another attempt, with its own bill, which only the caller can decide on (RFC 9110, 9.2.2).
                    late = reused.loop.time() > sent_at + STALE_SECONDS
                    if reused.has_received or (late and not head.startswith(b"GET ")):
                        raise
            fresh = await pool.connect(timeouts.get("connect", self._connect_timeout_seconds))
            await fresh.send_request(head, body, read_timeout_seconds)
            return HTTPResponse(fresh, pool, read_timeout_seconds)
        except BaseException:  # includes cancellation: every way out gives the slot back
            pool.give_slot()
            raise

    def pool(self, url: httpx2.URL) -> OriginPool:
        """The connection pool for a URL's scheme, host and port. The same object for the life of the transport."""
        key = (url.scheme, url.host, url.port)
        if (pool := self._pools.get(key)) is None:
            if url.scheme not in ("http", "https") or not url.host:
                raise httpx2.UnsupportedProtocol(f"not an http or https URL: {url}")
            if url.scheme == "https" and self._ssl_context is None:
                self._ssl_context = ssl.create_default_context()
            pool = self._pools[key] = OriginPool(
                url.host,
                url.port or (443 if url.scheme == "https" else 80),
                self._ssl_context if url.scheme == "https" else None,
                self._max_connections_per_origin,
                self._keepalive_seconds,
            )
        return pool

    async def aclose(self) -> None:
        """Close the idle connections. Those in use are closed with their responses."""
        for pool in self._pools.values():
            pool.close_idle()
        await asyncio.sleep(0)  # lets the event loop close their sockets


class HTTPResponse(httpx2.AsyncByteStream):
    """A response whose head has arrived. Iterating yields the body in the pieces in which it arrives.

    Gives back its connection and its slot at the end of the body, on an error, or when it is closed.
    """

    def __init__(self, connection: Connection, pool: OriginPool, read_timeout_seconds: float | None) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self._connection = connection
        self._pool = pool
        self._read_timeout_seconds = read_timeout_seconds
        self._closed = False

    def header(self, name: bytes) -> bytes:
        """The first value of a header, by its name in lower case. b"" if there is none."""
        for sent_name, value in self.headers:
            if sent_name.lower() == name:
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

    async def read_body(self, max_bytes: int) -> bytes:
        """The rest of the body, cut off after `max_bytes`."""
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
        """Give connection and slot back. Before the end of the body, this closes the connection."""
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.release()
            self._pool.give_slot()


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers in wire format. Raises `LocalProtocolError` if a name or value contains a line break."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    text = b"".join(lines)
    if text.count(b"\n") != len(lines) or text.count(b"\r") != len(lines):
        raise httpx2.LocalProtocolError("a header contains a line break")
    return text
