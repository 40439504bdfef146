"""A stream between two real connections, which native code may pass on, and what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import re
import socket
import struct
import termios
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from gateway.billing.received_text import ReceivedText
from gateway.providers.base import ProviderFailure
from gateway.providers.native_relay.compiler import CompileError, compile_relay
from gateway.providers.native_relay.relay import StreamRelay, load_library
from gateway.providers.redaction import NOTHING_SECRET
from gateway.providers.responses import EventStreamResponse
from gateway.providers.sse import count_events
from gateway.providers.text_events import DirectText, TextSink
from gateway.providers.transport import HTTPResponse
from gateway.providers.transport.connection import Connection
from gateway.providers.transport.origin_pool import OriginPool
from tests.gateway.providers.scripted_server import STREAM_HEAD
from tests.gateway.providers.test_direct_text import Passed

PATIENCE_SECONDS = 30.0


def new_relay() -> StreamRelay:
    try:
        return StreamRelay(load_library(compile_relay()))
    except CompileError as error:
        pytest.skip(f"the relay cannot be compiled: {error}")


def narrow_connection() -> tuple[socket.socket, socket.socket]:
    """The ends of a TCP connection that holds only some kilobytes, of which the system takes a part of a write."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client.connect(listening.getsockname())
        accepted, _ = listening.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return client, accepted


class ClientSide(asyncio.Protocol):
    """The gateway's side of a client's connection. Implements `ClientFlow` as `JoinedProtocol` and its flow do."""

    def __init__(self) -> None:
        self.write_paused = False
        self.when_lost: Callable[[], None] | None = None
        self.writable = asyncio.Event()

    def pause_writing(self) -> None:
        self.write_paused = True
        self.writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.write_paused = True
        if self.when_lost is not None:
            self.when_lost()


class Wait:
    """A time limit, as `DirectText` sees it."""

    def __init__(self) -> None:
        self.since: float | None = 0.0
        self.refresh: Callable[[], None] | None = None


class Stream:
    """Relays one stream as `Settlement` and `Upstream` do; in Python, if there is no relay.

    `server` and `client` are the sockets at the other ends.
    """

    def __init__(self, relay: StreamRelay | None, *, until: float = math.inf) -> None:
        self.relay = relay
        self.text = ReceivedText()
        self.flow = ClientSide()
        self.wait = Wait()
        self.until = until
        self.noted: list[bytes] | None = None
        self.client_reads = True
        self.received = b""  # by the client, with the transfer coding
        self.client_sockets = socket.socketpair  # makes the client's socket and the gateway's

    begun: ClassVar[list[Stream]] = []

    async def begin(self, sockets: tuple[socket.socket, socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.begun.append(self)
        self.server, connected = sockets or socket.socketpair()
        self.client, accepted = self.client_sockets()
        self.server.setblocking(False)
        self.client.setblocking(False)
        pool = OriginPool("x", 1, None, 1, 1.0, relay=self.relay)
        pool.take_free_slot()
        _, self.connection = await loop.create_connection(lambda: Connection(loop, pool), sock=connected)
        self.client_transport, _ = await loop.create_connection(lambda: self.flow, sock=accepted)
        self._receiving = connected.fileno()
        direct = DirectText(self.text, self.flow, self.client_transport, self.until)
        direct.wait, direct.now = self.wait, loop.time
        if self.noted is not None:
            direct.note_text = self.noted.append
        sending = asyncio.create_task(self.connection.send_request(b"", b"", None))
        await loop.sock_recv(self.server, 100)
        await loop.sock_sendall(self.server, STREAM_HEAD)
        await sending
        self.response = EventStreamResponse(HTTPResponse(self.connection, pool, None), NOTHING_SECRET)
        self.relaying = asyncio.create_task(self.response.stream_to(self._take, TextSink(self._take_text, direct)))
        await asyncio.sleep(0)

    def _write(self, chunk: bytes) -> bool:
        if not self.client_transport.is_closing():
            self.client_transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    def _take(self, chunk: bytes) -> bool:
        self.text.add(chunk, count_events(chunk))
        return self._write(chunk)

    def _take_text(self, chunk: bytes, events: int) -> bool:
        self.text.add(chunk, events)
        return self._write(chunk)

    async def send(self, read: bytes) -> None:
        """Send bytes to the gateway, and wait until they were read, so that they are one read."""
        await asyncio.get_running_loop().sock_sendall(self.server, read)
        while not self.relaying.done() and self._unread_bytes():
            await asyncio.sleep(0)
        for _ in range(4):  # turns of the event loop, in which native code adopts the stream or hands it over
            await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            while self.client_reads and (data := self.client.recv(2**20)):
                self.received += data

    def _unread_bytes(self) -> int:
        """That the kernel has for the gateway."""
        return int(struct.unpack("i", fcntl.ioctl(self._receiving, termios.FIONREAD, b"\0" * 4))[0])

    async def handed_over(self) -> None:
        """Wait until native code does not pass on the stream."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.is_native():
                await asyncio.sleep(0)

    def is_native(self) -> bool:
        return self.relay is not None and bool(self.relay.streams)

    async def read_to(self, end: bytes) -> None:
        """Let the client read until it has received this."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self.received.endswith(end):
                self.received += await loop.sock_recv(self.client, 2**20)

    async def finish(self) -> Passed:
        """Wait for the end of the stream, and close all connections."""
        failure = ""
        try:
            assert await self.relaying
        except ProviderFailure as failed:
            failure = str(failed)
        await self.response.aclose()
        loop = asyncio.get_running_loop()
        self.client_transport.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while data := await loop.sock_recv(self.client, 2**20):
                self.received += data
        self.close()
        payload = without_coding(self.received)
        return Passed(payload, self.text.received, self.text.events, self.text.sample_text, failure)

    def close(self) -> None:
        self.connection.abort()
        self.client_transport.abort()
        self.server.close()
        self.client.close()


async def relayed(relay: StreamRelay | None, reads: Sequence[bytes], *, until: float = math.inf) -> Passed:
    """Relay a stream that arrives in these reads. Without a relay, in Python."""
    stream = Stream(relay, until=until)
    await stream.begin()
    for read in reads:
        if stream.relaying.done():
            break
        await stream.send(read)
    return await stream.finish()


def without_coding(body: bytes) -> bytes:
    """The payload of a body that consists of whole chunks of the transfer coding."""
    payload = b""
    while body:
        size = re.match(rb"([0-9a-f]+)\r\n", body)
        assert size is not None, body[:100]
        start, length = size.end(), int(size[1], 16)
        payload += body[start : start + length]
        assert body[start + length :][:2] == b"\r\n"
        body = body[start + length + 2 :]
    return payload
