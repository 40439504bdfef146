"""Connection: forms of responses, broken connections, cancellation and flow control."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import httpx2
import pytest

from gateway.providers.transport import HTTPTransport
from gateway.providers.transport.connection import MAX_HEAD_BYTES, Connection
from tests.gateway.providers.scripted_server import (
    STREAM_HEAD,
    TIMEOUT_SECONDS,
    ReceivedRequest,
    ScriptedServer,
    chunked,
    json_response,
    reset,
)
from tests.gateway.providers.transport.exchanges import answering, fetch, pieces, post


async def test_read_timeout_before_the_head_and_in_the_body(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering()) as server:
        with pytest.raises(httpx2.ReadTimeout):
            await fetch(transport, post(server, read=0.05))
        await server.until_the_client_closed()
    async with ScriptedServer(answering(STREAM_HEAD + chunked(b"part"))) as server:
        response = await transport.handle_async_request(post(server, read=0.05))
        parts = aiter(pieces(response))
        assert await anext(parts) == b"part"
        with pytest.raises(httpx2.ReadTimeout):
            await anext(parts)
        await server.until_the_client_closed()


@pytest.mark.parametrize(
    "answer",
    [
        json_response(b"{}").replace(b"content-length: 2", b"content-length: 3"),
        STREAM_HEAD + chunked(b"part"),
        STREAM_HEAD + b"ff\r\npart",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"",
    ],
)
@pytest.mark.parametrize("end", [asyncio.StreamWriter.close, reset])
async def test_a_response_that_is_cut(
    transport: HTTPTransport, answer: bytes, end: Callable[[asyncio.StreamWriter], None]
) -> None:
    async def cut(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        end(writer)

    async with ScriptedServer(cut) as server:
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server))


async def test_bytes_before_the_cut_are_returned_first(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(STREAM_HEAD, chunked(b"part"), close=True)) as server:
        response = await transport.handle_async_request(post(server))
        parts = []
        with pytest.raises(httpx2.ReadError):
            async for part in pieces(response):
                parts.append(part)
        assert b"".join(parts) == b"part"


async def test_a_body_without_a_length_ends_with_its_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(b"HTTP/1.1 200 OK\r\n\r\nall", close=True)) as server:
        _, body = await fetch(transport, post(server))
        assert body == b"all"


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", STREAM_HEAD + b"zz\r\n",
     b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1)],
)  # fmt: skip
async def test_a_response_that_is_not_http(transport: HTTPTransport, answer: bytes) -> None:
    async with ScriptedServer(answering(answer)) as server:
        with pytest.raises(httpx2.RemoteProtocolError):
            await fetch(transport, post(server))
        await server.until_the_client_closed()


async def test_a_response_without_a_request_is_discarded(transport: HTTPTransport) -> None:
    async def twice_the_first_time(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(received.body) * (2 if len(server.requests) == 1 else 1))

    async with ScriptedServer(twice_the_first_time) as server:
        for body in (b"first", b"second"):
            assert (await fetch(transport, post(server, body)))[1] == body


async def test_informational_responses_are_skipped(transport: HTTPTransport) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n"
    async with ScriptedServer(answering(b"HTTP/1.1 100 Continue\r\n\r\n", early, json_response(b"{}"))) as server:
        response, body = await fetch(transport, post(server))
        assert (response.status_code, body) == (200, b"{}")
        assert "link" not in response.headers


async def test_cancelling_a_caller_that_waits_for_the_head_closes_the_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering()) as server:
        task = asyncio.create_task(transport.handle_async_request(post(server)))
        await server.until_a_request_arrived()
        assert not server.client_closed
        task.cancel()
        await server.until_the_client_closed()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_cancelling_a_reader_closes_the_connection(
    transport: HTTPTransport,
) -> None:
    async with ScriptedServer(answering(STREAM_HEAD)) as server:
        response = await transport.handle_async_request(post(server))
        task = asyncio.ensure_future(anext(aiter(pieces(response))))
        await asyncio.sleep(0)
        task.cancel()
        await server.until_the_client_closed()
        with pytest.raises(asyncio.CancelledError):
            await task
        await response.aclose()  # safe, and gives the slot back only once


async def test_large_bodies_both_ways(transport: HTTPTransport) -> None:
    large = bytes(range(256)) * 40_000  # 10 MB

    async def echo(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(received.body))

    async with ScriptedServer(echo) as server:
        assert (await fetch(transport, post(server, large)))[1] == large
        assert (await fetch(transport, post(server, b"small")))[1] == b"small"
        assert server.connections == 1


async def test_a_slow_reader_stops_the_sender(transport: HTTPTransport) -> None:
    """The sender's `drain` must block before it has sent everything."""
    piece, count = bytes(1024 * 1024), 64
    sent = 0
    stalled = asyncio.Event()

    async def send_pieces(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(piece) * count))
        for _ in range(count):
            writer.write(piece)
            sent += 1
            drained = asyncio.ensure_future(writer.drain())
            done, _pending = await asyncio.wait([drained], timeout=0.5)
            if not done:
                stalled.set()
            await drained

    async with ScriptedServer(send_pieces) as server:
        response = await transport.handle_async_request(post(server))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await stalled.wait()
        assert sent < count
        assert sum([len(part) async for part in pieces(response)]) == len(piece) * count


def _connections() -> list[Connection]:
    return [each for each in gc.get_objects() if type(each) is Connection]


async def test_a_lost_connection_is_freed_without_the_garbage_collector(transport: HTTPTransport) -> None:
    gc.collect()
    gc.disable()
    earlier = _connections()  # which other tests left
    try:
        async with ScriptedServer(answering(STREAM_HEAD + chunked(b"part"))) as server:
            response = await transport.handle_async_request(post(server))
            assert await anext(aiter(pieces(response))) == b"part"
            await response.aclose()
            await server.until_the_client_closed()
        del response
        assert not [each for each in _connections() if each not in earlier]
    finally:
        gc.enable()
