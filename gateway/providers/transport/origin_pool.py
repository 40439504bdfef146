"""Where a URL leads: the connections to one scheme, host and port.

A connection in use holds a slot. Slots bound how many there are, and whoever finds none waits for one, first come,
first served. Between exchanges a connection lies idle here, and holds no slot.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

import httpx2

from gateway.providers.transport.connection import Connection


class OriginPool:
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
        self._idle: dict[Connection, float] = {}  # since when (loop seconds); the youngest last

    async def take_slot(self, timeout_seconds: float | None) -> None:
        """To be given back by `give_slot`. Raises `PoolTimeout`."""
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

    def take_idle(self) -> Connection | None:
        """The youngest, because it is the least likely to be closed by the server just now."""
        if not self._idle:
            return None
        connection, since = self._idle.popitem()
        if connection.loop.time() - since < self._keepalive_seconds:
            return connection
        connection.abort()
        self.close_idle()  # the others are older still
        return None

    def keep(self, connection: Connection) -> None:
        """What a busier time has left behind goes meanwhile: as long as there are younger ones, nobody takes it."""
        now = connection.loop.time()
        self._idle[connection] = now
        while now - self._idle[oldest := next(iter(self._idle))] > self._keepalive_seconds:
            del self._idle[oldest]
            oldest.abort()

    def forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def close_idle(self) -> None:
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    async def connect(self, timeout_seconds: float | None) -> Connection:
        """A new one, TLS included. Raises `ConnectTimeout` and `ConnectError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self), self._host, self._port, ssl=self._ssl_context
                )
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(f"no connection to {self._host}:{self._port} in time") from error
        except OSError as error:  # TLS and name resolution too
            raise httpx2.ConnectError(f"no connection to {self._host}:{self._port}: {error}") from error
        return connection
