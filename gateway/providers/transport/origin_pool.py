"""The connection pool of one origin: a scheme, host and port.

A connection in use holds a slot. The number of slots is bounded. A caller that finds no free slot waits for one, first
come, first served. Between requests, a connection is kept here as idle and holds no slot.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

import httpx2

from gateway.providers.transport.connection import Connection


class OriginPool:
    """Keeps the idle connections to one origin, and bounds those in use. Not thread-safe."""

    def __init__(
        self, host: str, port: int, ssl_context: ssl.SSLContext | None, max_connections: int, keepalive_seconds: float
    ) -> None:
        self._host = host
        self._port = port
        self._ssl_context = ssl_context
        self._keepalive_seconds = keepalive_seconds
        self._free_slots = max_connections
        self._waiting: deque[asyncio.Future[None]] = deque()  # callers without a slot, oldest first
        self._idle: dict[Connection, float] = {}  # idle since when (loop time), the youngest last

    async def take_slot(self, timeout_seconds: float | None) -> None:
        """Wait for a slot. The caller gives it back by `give_slot`. Raises `PoolTimeout`."""
        if self._free_slots:
            self._free_slots -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            async with asyncio.timeout(timeout_seconds):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():  # granted in the same tick as the timeout or cancellation
                self.give_slot()
            if isinstance(error, TimeoutError):
                raise httpx2.PoolTimeout(f"all connections to {self._host}:{self._port} are in use") from error
            raise

    def give_slot(self) -> None:
        """Give a slot to the caller that has waited longest, or back to the free ones."""
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                return
        self._free_slots += 1

    def take_idle(self) -> Connection | None:
        """The youngest idle connection, which the server is the least likely to be closing. None if there is none."""
        if not self._idle:
            return None
        connection, since = self._idle.popitem()
        if connection.loop.time() - since < self._keepalive_seconds:
            return connection
        connection.abort()
        self.close_idle()  # the others are even older
        return None

    def put_idle(self, connection: Connection) -> None:
        """Keep a connection for the next request, and close those that have been idle for too long.

        `take_idle` takes the youngest, so it does not reach the oldest as long as there are younger ones.
        """
        now = connection.loop.time()
        self._idle[connection] = now
        while now - self._idle[oldest := next(iter(self._idle))] > self._keepalive_seconds:
            del self._idle[oldest]
            oldest.abort()

    def discard(self, connection: Connection) -> None:
        """Drop a connection that was closed, whether or not it was idle."""
        self._idle.pop(connection, None)

    def close_idle(self) -> None:
        """Close all idle connections. Those in use are not affected."""
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    async def connect(self, timeout_seconds: float | None) -> Connection:
        """Open a new connection, including TLS. Raises `ConnectTimeout` and `ConnectError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self), self._host, self._port, ssl=self._ssl_context
                )
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(f"connecting to {self._host}:{self._port} timed out") from error
        except OSError as error:  # includes errors of TLS and of name resolution
            raise httpx2.ConnectError(f"connecting to {self._host}:{self._port} failed: {error}") from error
        return connection
