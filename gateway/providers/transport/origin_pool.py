"""Connection pool of one origin (scheme, host and port): limits connections in use and keeps idle ones.

A connection in use occupies a slot, and the number of slots is limited. If no slot is free, callers wait in the order
of their arrival. Between requests, the pool keeps a connection as idle. An idle connection occupies no slot.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque

import httpx2

from gateway.core.timers import time_bound
from gateway.providers.native_relay.relay import StreamRelay
from gateway.providers.transport.connection import Connection
from gateway.providers.transport.proxy import Proxy


class OriginPool:
    """Keeps the idle connections to one origin, and limits the connections in use. Not thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        ssl_context: ssl.SSLContext | None,
        max_connections: int,
        keepalive_seconds: float,
        proxy: Proxy | None = None,
        address: str | None = None,
        relay: StreamRelay | None = None,
    ) -> None:
        """`address` is connected to instead of resolving `host`, which TLS still verifies. Not with a proxy."""
        self.relay = relay
        self._proxy = proxy
        self._address = address or host
        self.rewrites = proxy is not None and ssl_context is None  # whether `rewritten` is sent instead of a head
        self._host = host
        self._port = port
        self._ssl_context = ssl_context
        self._keepalive_seconds = keepalive_seconds
        self._free_slots = max_connections
        self._waiting: deque[asyncio.Future[None]] = deque()  # callers without a slot, oldest first
        self._idle: dict[Connection, float] = {}  # loop time since which each is idle, the most recent last

    def take_free_slot(self) -> bool:
        """Take a slot if one is free. Otherwise the caller must await `wait_for_slot`."""
        if not self._free_slots:
            return False
        self._free_slots -= 1
        return True

    async def wait_for_slot(self, timeout_seconds: float | None) -> None:
        """Wait for a slot. The caller releases the slot with `give_slot`. Raises `PoolTimeout`."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            async with time_bound(math.inf if timeout_seconds is None else timeout_seconds):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():  # granted in the same tick as the timeout or cancellation
                self.give_slot()
            if isinstance(error, TimeoutError):
                raise httpx2.PoolTimeout(f"all connections to {self._host}:{self._port} are in use") from error
            raise

    def give_slot(self) -> None:
        """Release a slot. The caller that has waited longest gets it."""
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                return
        self._free_slots += 1

    def take_idle(self) -> Connection | None:
        """Return the most recently used idle connection, or None. The server is least likely to be closing that one."""
        if not self._idle:
            return None
        connection, since = self._idle.popitem()
        if connection.loop.time() - since < self._keepalive_seconds:
            return connection
        connection.abort()
        self.close_idle()  # the other connections have been idle even longer
        return None

    def put_idle(self, connection: Connection) -> None:
        """Keep a connection for the next request, and close the connections that have been idle for too long.

        They must be closed here, because `take_idle` takes the most recently used connection and rarely reaches them.
        """
        now = connection.loop.time()
        self._idle[connection] = now
        while now - self._idle[oldest := next(iter(self._idle))] > self._keepalive_seconds:
            del self._idle[oldest]
            oldest.abort()

    def discard(self, connection: Connection) -> None:
        """Remove a connection that was closed, whether or not it was idle."""
        self._idle.pop(connection, None)

    def close_idle(self) -> None:
        """Close all idle connections. Connections in use stay open."""
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def rewritten(self, head: bytes) -> bytes:
        """Return the head of a request as the proxy expects it. Only if `rewrites` is true."""
        assert self._proxy is not None
        return self._proxy.rewritten(head, self._host, self._port)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        if self._proxy is None:
            _, connection = await loop.create_connection(
                lambda: Connection(loop, self),
                self._address,
                self._port,
                ssl=self._ssl_context,
                server_hostname=None if self._ssl_context is None else self._host,
            )
            return connection
        if self._ssl_context is None:
            _, connection = await loop.create_connection(
                lambda: Connection(loop, self), self._proxy.host, self._proxy.port
            )
            return connection
        tunnel = await self._proxy.open_tunnel(loop, self._host, self._port)
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(loop, self), sock=tunnel, ssl=self._ssl_context, server_hostname=self._host
            )
        except BaseException:
            tunnel.close()
            raise
        return connection

    async def connect(self, timeout_seconds: float | None) -> Connection:
        """Open a new connection, including TLS. Raises `ConnectTimeout` and `ConnectError`."""
        loop = asyncio.get_running_loop()
        try:
            async with time_bound(math.inf if timeout_seconds is None else timeout_seconds):
                return await self._open(loop)
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(f"connecting to {self._host}:{self._port} timed out") from error
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message.rstrip(".") or str(error)
            raise httpx2.ConnectError(f"the certificate of {self._host}:{self._port} is not valid: {reason}") from error
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).replace("_", " ").lower()
            raise httpx2.ConnectError(f"TLS with {self._host}:{self._port} failed: {reason}") from error
        except OSError as error:  # includes errors of name resolution
            raise httpx2.ConnectError(f"connecting to {self._host}:{self._port} failed: {error}") from error
