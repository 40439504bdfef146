"""The lower bound of a proxy's cost in Python: a relay that passes bytes on in both directions, without parsing HTTP.

python -m benchmarks.gateway.bare_relay UPSTREAM_PORT            # prints "listening on PORT"
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Upstream(asyncio.Protocol):
    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.close()


class Client(asyncio.Protocol):
    """A client's connection and its own connection to the upstream. Buffers what arrives before the latter is open."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._upstream: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connecting = asyncio.ensure_future(self._connect(cast(asyncio.Transport, transport)))

    async def _connect(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        upstream, _ = await loop.create_connection(lambda: Upstream(client), "127.0.0.1", self._upstream_port)
        upstream.writelines(self._early)
        self._upstream = upstream

    def data_received(self, data: bytes) -> None:
        if self._upstream is None:
            self._early.append(data)
        else:
            self._upstream.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()


async def serve(upstream_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(upstream_port), "127.0.0.1", 0, backlog=1024)
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
