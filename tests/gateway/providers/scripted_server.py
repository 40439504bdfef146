"""A raw HTTP server for tests, on a free port: a script writes each response, byte for byte."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

TIMEOUT_SECONDS = 10.0  # a test that hangs fails after this


@dataclass(frozen=True)
class ReceivedRequest:
    """One request as it arrived, and the number of its connection (from 0)."""

    head: str
    body: bytes
    connection: int
    headers: dict[str, str] = field(default_factory=dict)


# Writes the response to one request. A script that writes nothing leaves the client waiting.
Script = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]


class ScriptedServer:
    """Runs `script` for each request, and records requests, connections and whether a client closed one."""

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None) -> None:
        self._script = script
        self._tls = tls
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.requests: list[ReceivedRequest] = []
        self._arrived = asyncio.Event()
        self._client_closed = asyncio.Event()
        self.connections = 0
        self.port = 0

    @property
    def base_url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, *(w.wait_closed() for w in self._writers), return_exceptions=True)

    async def until_a_request_arrived(self) -> None:
        await asyncio.wait_for(self._arrived.wait(), TIMEOUT_SECONDS)

    async def until_the_client_closed(self) -> None:
        await asyncio.wait_for(self._client_closed.wait(), TIMEOUT_SECONDS)

    @property
    def client_closed(self) -> bool:
        """Whether a client has closed a connection."""
        return self._client_closed.is_set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._tasks.append(asyncio.ensure_future(self._connection(reader, writer, self.connections)))
        self.connections += 1

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        try:
            while not writer.is_closing():
                head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append(ReceivedRequest(head, body, number, headers))
                self._arrived.set()
                await self._script(self.requests[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._client_closed.set()
        finally:
            writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection now, without flushing what is not yet written."""
    writer.transport.abort()


def json_response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)
