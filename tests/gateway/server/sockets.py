"""Uvicorn with our protocol around a small application, and requests as bytes on a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.server.http_protocol import Connections, JoinedProtocol

TIMEOUT_SECONDS = 60.0
MUCH = b"x" * (32 * 2**20)  # more than all buffers between two sockets hold


def head(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(content: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def replying(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for message in messages:
            await send(message)

    return app


@asynccontextmanager
async def serving(
    app: ASGIApp, connections: Connections | None = None, *, keep_alive_seconds: float = 60
) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, http=JoinedProtocol, lifespan="off", log_config=None, server_header=False, date_header=False
    )
    config.timeout_keep_alive = keep_alive_seconds  # type: ignore[assignment]
    server = uvicorn.Server(config)
    server.server_state = connections or Connections()
    listener = socket.create_server(("127.0.0.1", 0))
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    try:
        yield listener.getsockname()[1]
    finally:
        await server.shutdown([listener])


async def ask(port: int, *requests: bytes, until: bytes | None = None) -> bytes:
    """All that comes back until the server closes, or until `until` has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(requests))
    received = bytearray()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not (until is not None and received.endswith(until)):
            data = await reader.read(65536)
            if not data:
                break
            received += data
    writer.close()
    return bytes(received)


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
