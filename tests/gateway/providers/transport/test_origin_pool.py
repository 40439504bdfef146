"""OriginPool: reuse of connections, their bound, their age, and failures to connect."""

from __future__ import annotations

import asyncio
import socket

import httpx2
import pytest

from gateway.providers.transport import HTTPTransport
from tests.gateway.providers.scripted_server import (
    STREAM_HEAD,
    TIMEOUT_SECONDS,
    ReceivedRequest,
    ScriptedServer,
    json_response,
)
from tests.gateway.providers.transport.exchanges import answering, fetch, post
from tests.ports import refusing_port


async def test_a_connection_is_reused(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_response(b"{}"))) as server:
        for _ in range(3):
            await fetch(transport, post(server))
        assert server.connections == 1


async def test_a_connection_is_not_reused_after_connection_close(transport: HTTPTransport) -> None:
    answer = json_response(b"{}", "200 OK", "connection: close")
    async with ScriptedServer(answering(answer)) as server:
        await fetch(transport, post(server))
        await fetch(transport, post(server))
        assert server.connections == 2


async def test_an_old_connection_is_not_reused() -> None:
    script = answering(json_response(b"{}"))
    async with ScriptedServer(script) as server, HTTPTransport(keepalive_seconds=0.0) as transport:
        await fetch(transport, post(server))
        await fetch(transport, post(server))
        assert server.connections == 2


async def test_old_idle_connections_are_closed_while_younger_ones_are_reused() -> None:
    both = asyncio.Barrier(2)

    async def script(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) <= 2:
            await both.wait()
        writer.write(json_response(b"{}"))

    async with ScriptedServer(script) as server, HTTPTransport(keepalive_seconds=0.2) as transport:
        await asyncio.gather(fetch(transport, post(server)), fetch(transport, post(server)))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not server.client_closed:
                await fetch(transport, post(server))


async def test_a_connection_that_the_server_closed_while_idle_is_replaced(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_response(b"{}"), close=True)) as server:
        for _ in range(3):
            _, body = await fetch(transport, post(server))
            assert body == b"{}"
            await asyncio.sleep(0.02)  # the server closes the connection
        assert server.connections == 3


async def test_connection_refused(transport: HTTPTransport) -> None:
    with refusing_port() as port, pytest.raises(httpx2.ConnectError):
        await fetch(transport, httpx2.Request("GET", f"http://127.0.0.1:{port}/"))


async def test_a_name_that_does_not_resolve(transport: HTTPTransport) -> None:
    with pytest.raises(httpx2.ConnectError):
        await fetch(transport, httpx2.Request("GET", "http://nowhere.invalid/"))


async def test_connect_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, but never answers the TLS handshake
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(httpx2.ConnectTimeout):
            await fetch(HTTPTransport(connect_timeout_seconds=0.05), httpx2.Request("GET", url))


async def test_a_server_without_tls(transport: HTTPTransport) -> None:
    async def speak_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no TLS here\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(speak_plainly, "127.0.0.1", 0) as plain:
        url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}/"
        with pytest.raises(httpx2.ConnectError):
            await fetch(transport, httpx2.Request("GET", url))


async def test_the_bound_on_connections_is_per_origin() -> None:
    async with (
        ScriptedServer(answering(STREAM_HEAD)) as full,
        ScriptedServer(answering(json_response(b"{}"))) as other,
        HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=0.05) as transport,
    ):
        held = await transport.handle_async_request(post(full))
        with pytest.raises(httpx2.PoolTimeout):
            await fetch(transport, post(full))
        await fetch(transport, post(other))
        await held.aclose()
        await (await transport.handle_async_request(post(full))).aclose()


async def test_a_waiting_caller_gets_the_next_free_connection() -> None:
    transport = HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=TIMEOUT_SECONDS)
    async with ScriptedServer(answering(json_response(b"{}"))) as server:
        await asyncio.gather(*(fetch(transport, post(server)) for _ in range(5)))
        assert server.connections == 1
    await transport.aclose()
