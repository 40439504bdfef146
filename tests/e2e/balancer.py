"""A load balancer for TCP connections, as tests of rolling restarts need it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHECK_SECONDS = 0.5  # between the balancer's readiness checks
LAME_DUCK_SECONDS = "1.5"  # of the gateways; longer than the time between two checks


class Balancer:
    """Balances TCP connections over the replicas that its last check found ready, or over all if none was."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self.ready: set[int] = set()
        self.connections: Counter[int] = Counter()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        checks = [asyncio.create_task(self._check(port)) for port in self._ports]
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for check in checks:
                check.cancel()
            server.close()

    async def until_ready(self, count: int) -> None:
        """Wait until so many replicas are ready."""
        while len(self.ready) < count:
            await asyncio.sleep(CHECK_SECONDS)

    async def _check(self, port: int) -> None:
        while True:
            (self.ready.add if await _is_ready(port) else self.ready.discard)(port)
            await asyncio.sleep(CHECK_SECONDS)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = min(self.ready or self._ports, key=lambda each: self.connections[each])
        self.connections[port] += 1
        upstream = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pump(reader, upstream[1]), _pump(upstream[0], writer))


async def _is_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
