"""HTTP client: `HTTPTransport.send` sends a request and returns an `HTTPResponse`, whose body is read piece by piece.

`send` takes a slot of the origin's pool, then an idle connection or a new connection. If the server has closed a reused
connection, `send` sends the request once more on a new connection. The response releases the connection and the slot
when the body ends or when the response is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from weakref import WeakValueDictionary

import httpx2

from gateway.policy import UpstreamTLS
from gateway.providers.native_relay.relay import StreamRelay
from gateway.providers.request_progress import REQUEST_PROGRESS
from gateway.providers.text_events import DirectText
from gateway.providers.transport.connection import Connection
from gateway.providers.transport.origin_pool import OriginPool
from gateway.providers.transport.proxy import Proxy
from gateway.providers.transport.tls import tls_context

MAX_CONNECTIONS_PER_ORIGIN = 16_384  # a safety limit; the `max_concurrency` of a deployment is smaller
POOL_TIMEOUT_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 5.0
KEEPALIVE_SECONDS = 4.0  # below the 5 s after which uvicorn, and with it vLLM and SGLang, closes an idle connection
STALE_SECONDS = 0.002  # if a reused connection ends so soon, the server closed it before the request
TLS_EXTENSION = "warmpath.tls"  # of an httpx2 request: the `UpstreamTLS` of its deployment
PROXY_EXTENSION = "warmpath.proxy"  # of an httpx2 request: the `Proxy` of its deployment
NO_TIMEOUTS: Mapping[str, float | None] = MappingProxyType({})


class HTTPTransport(httpx2.AsyncBaseTransport):
    """HTTP client with connections to any number of origins.

    Each origin has its own connection limit, so a hanging server does not affect the others. The timeouts are defaults.
    The `timeout` extension of a request (connect, read, pool), as in httpx, overrides them. There is no default read
    timeout, because the policy limits how long a model may take, and the code that enforces the limit cancels the task.
    """

    def __init__(
        self,
        *,
        max_connections_per_origin: int = MAX_CONNECTIONS_PER_ORIGIN,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
        pool_timeout_seconds: float = POOL_TIMEOUT_SECONDS,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        relay: StreamRelay | None = None,
    ) -> None:
        """`relay` passes on the texts of streams. `aclose` closes it."""
        self._max_connections_per_origin = max_connections_per_origin
        self._connect_timeout_seconds = connect_timeout_seconds
        self._pool_timeout_seconds = pool_timeout_seconds
        self._keepalive_seconds = keepalive_seconds
        self._relay = relay
        # A pool lives as long as a provider or an open connection uses it, so that addresses of removed pods are freed.
        self._pools = WeakValueDictionary[tuple[str, str, int | None, UpstreamTLS | None, Proxy | None], OriginPool]()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send an httpx2 request (httpx2's transport interface).

        httpx2's request and response objects cost more CPU than the request itself. `send` avoids them.
        """
        if request.method == "HEAD":
            raise httpx2.LocalProtocolError("HEAD is not supported")
        head = b"%b %b HTTP/1.1\r\n" % (request.method.encode("ascii"), request.url.raw_path)
        head += header_lines(request.headers.raw)
        timeouts = request.extensions.get("timeout", NO_TIMEOUTS)
        pool = self.pool(request.url, request.extensions.get(TLS_EXTENSION), request.extensions.get(PROXY_EXTENSION))
        response = await self.send(pool, head, await request.aread(), timeouts)
        return httpx2.Response(response.status, headers=response.headers, stream=response)

    async def send(
        self, pool: OriginPool, head: bytes, body: bytes, timeouts: Mapping[str, float | None] = NO_TIMEOUTS
    ) -> HTTPResponse:
        """Send a request, and return when the head of the response has arrived. The caller closes the response.

        `head` is the request line and the header lines, each with its CRLF. It includes `host` and `content-length`.
        """
        read_timeout_seconds = timeouts.get("read")
        if pool.rewrites:
            head = pool.rewritten(head)
        progress = REQUEST_PROGRESS.get()
        progress.unsent = True
        if not pool.take_free_slot():
            await pool.wait_for_slot(timeouts.get("pool", self._pool_timeout_seconds))
        try:
            if (reused := pool.take_idle()) is not None:
                progress.unsent = False
                sent_at = reused.loop.time()
                try:
                    await reused.send_request(head, body, read_timeout_seconds)
                    return HTTPResponse(reused, pool, read_timeout_seconds)
                except httpx2.ReadError:
                    # If the server closes the connection later, it may have begun to process the request. A second
                    # request would then be a new attempt with its own cost, which only the caller may decide (RFC
                    # 9110, 9.2.2).
                    late = reused.loop.time() > sent_at + STALE_SECONDS
                    if reused.has_received or (late and not head.startswith(b"GET ")):
                        raise
                    progress.unsent = True  # the server closed the connection before it could read the request
            fresh = await pool.connect(timeouts.get("connect", self._connect_timeout_seconds))
            progress.unsent = False
            await fresh.send_request(head, body, read_timeout_seconds)
            return HTTPResponse(fresh, pool, read_timeout_seconds)
        except BaseException:  # includes cancellation; every exception must release the slot
            pool.give_slot()
            raise

    def pool(self, url: httpx2.URL, tls: UpstreamTLS | None = None, proxy: Proxy | None = None) -> OriginPool:
        """Return the connection pool for a URL's scheme, host and port, TLS files and proxy.

        It is the same object as long as the caller, or an open connection, refers to it. The files are read once, when
        the pool is made. Raises `UnusableFile`.
        """
        key = (url.scheme, url.host, url.port, tls, proxy)
        if (pool := self._pools.get(key)) is None:
            if url.scheme not in ("http", "https") or not url.host:
                raise httpx2.UnsupportedProtocol(f"not an http or https URL: {url}")
            pool = self._pools[key] = OriginPool(
                url.host,
                url.port or (443 if url.scheme == "https" else 80),
                tls_context(tls) if url.scheme == "https" else None,
                self._max_connections_per_origin,
                self._keepalive_seconds,
                proxy,
                relay=self._relay,
            )
        return pool

    async def aclose(self) -> None:
        """Close the idle connections. A connection in use is closed with its response."""
        for pool in list(self._pools.values()):
            pool.close_idle()
        if self._relay is not None:
            self._relay.close()
        await asyncio.sleep(0)  # lets the event loop close the sockets


class HTTPResponse(httpx2.AsyncByteStream):
    """A response whose head has arrived. Iterating over it yields the pieces of the body as they arrive.

    Releases its connection and its slot at the end of the body, on an error, or when the response is closed.
    """

    def __init__(self, connection: Connection, pool: OriginPool, read_timeout_seconds: float | None) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self._connection = connection
        self._pool = pool
        self._read_timeout_seconds = read_timeout_seconds
        self._closed = False

    def header(self, name: bytes) -> bytes:
        """Return the first value of a header, or b"" if it is absent. `name` must be in lower case."""
        for sent_name, value in self.headers:
            if sent_name.lower() == name:
                return value
        return b""

    @property
    def has_arrived(self) -> bool:
        """Whether the end of the response has arrived, so that its connection can be used again."""
        return self._closed or self._connection.complete

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
        """Return the rest of the body, cut off after `max_bytes`."""
        if self.has_arrived and not self._closed:  # usually the body came with the head
            body = self._connection.take()
            self._close()
            return body[:max_bytes]
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

    async def stream_to(self, sink: Callable[[bytes], bool], direct: DirectText | None = None) -> bool:
        """Pass the rest of the body to `sink`. Returns False if `sink` returned False. See `Connection.stream_to`."""
        if self._closed:
            return True
        try:
            ended = await self._connection.stream_to(sink, self._read_timeout_seconds, direct)
        except BaseException:
            self._close()
            raise
        if ended:
            self._close()
        return ended

    async def aclose(self) -> None:
        """Release the connection and the slot. Closes the connection if the body has not ended."""
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.release()
            self._pool.give_slot()


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode headers as HTTP/1.1 lines. Raises `LocalProtocolError` if a name or value contains a line break."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    text = b"".join(lines)
    if text.count(b"\n") != len(lines) or text.count(b"\r") != len(lines):
        raise httpx2.LocalProtocolError("a header contains a line break")
    return text
