from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx2
import pytest

from gateway.providers import transport as module
from gateway.providers.transport import STALE_SECONDS, HTTPTransport
from tests.gateway.providers.scripted import (
    STREAM_HEAD,
    TIMEOUT_SECONDS,
    Received,
    ScriptedServer,
    coded,
    json_answer,
    reset,
)


@pytest.fixture
async def transport() -> AsyncIterator[HTTPTransport]:
    async with HTTPTransport() as transport:
        yield transport


def answering(*answers: bytes, close: bool = False) -> Callable[[Received, asyncio.StreamWriter], Awaitable[None]]:
    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            writer.write(answer)
            await writer.drain()
        if close:
            writer.close()

    return script


def post(server: ScriptedServer, body: bytes = b"{}", **timeout: float) -> httpx2.Request:
    return httpx2.Request("POST", f"{server.base_url}/x", content=body, extensions={"timeout": timeout})


def pieces(response: httpx2.Response) -> httpx2.AsyncByteStream:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    return response.stream


async def fetch(transport: HTTPTransport, request: httpx2.Request) -> tuple[httpx2.Response, bytes]:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        response = await transport.handle_async_request(request)
        return response, await response.aread()


async def test_status_headers_and_body_come_as_they_are(transport: HTTPTransport) -> None:
    answer = json_answer(b"\x1f\x8b raw", "418 Teapot", "content-encoding: gzip", "X-Cased: Caf\xe9")
    async with ScriptedServer(answering(answer.replace("é".encode(), b"\xe9"))) as server:
        response = await transport.handle_async_request(post(server, b'{"a": 1}'))
        parts = [part async for part in pieces(response)]
    assert response.status_code == 418
    assert (b"X-Cased", b"Caf\xe9") in response.headers.raw
    assert b"".join(parts) == b"\x1f\x8b raw"
    assert server.requests[0].head == "POST /v1/x HTTP/1.1"
    assert server.requests[0].body == b'{"a": 1}'


async def test_a_connection_is_used_again(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_answer(b"{}"))) as server:
        for _ in range(3):
            await fetch(transport, post(server))
        assert server.connections == 1


async def test_the_server_may_ask_not_to_use_it_again(transport: HTTPTransport) -> None:
    answer = json_answer(b"{}", "200 OK", "connection: close")
    async with ScriptedServer(answering(answer)) as server:
        await fetch(transport, post(server))
        await fetch(transport, post(server))
        assert server.connections == 2


async def test_an_old_connection_is_not_used_again() -> None:
    script = answering(json_answer(b"{}"))
    async with ScriptedServer(script) as server, HTTPTransport(keepalive_seconds=0.0) as transport:
        await fetch(transport, post(server))
        await fetch(transport, post(server))
        assert server.connections == 2


async def test_a_connection_that_the_server_closed_while_idle_is_replaced(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_answer(b"{}"), close=True)) as server:
        for _ in range(3):
            _, body = await fetch(transport, post(server))
            assert body == b"{}"
        assert server.connections == 3


async def test_a_request_that_crossed_the_close_of_its_connection_is_sent_again(
    transport: HTTPTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.providers.transport.STALE_SECONDS", 10.0)  # however slow this machine is

    async def closes_on_the_second(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.close()
        else:
            writer.write(json_answer(b"{}"))

    async with ScriptedServer(closes_on_the_second) as server:
        await fetch(transport, post(server, b"first"))
        await fetch(transport, post(server, b"second"))
        assert [r.body for r in server.requests] == [b"first", b"second", b"second"]
        assert [r.connection for r in server.requests] == [0, 0, 1]


async def test_but_not_work_that_may_have_been_begun(transport: HTTPTransport) -> None:
    async def closes_on_the_second(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            await asyncio.sleep(2 * STALE_SECONDS)
            writer.close()
        else:
            writer.write(json_answer(b"{}"))

    async with ScriptedServer(closes_on_the_second) as server:
        await fetch(transport, post(server, b"first"))
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server, b"second"))
        assert [r.connection for r in server.requests] == [0, 0]


async def test_but_not_once_a_byte_of_the_answer_came(transport: HTTPTransport) -> None:
    async def cuts_the_second(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200" if len(server.requests) == 2 else json_answer(b"{}"))
        if len(server.requests) == 2:
            await writer.drain()
            writer.close()

    async with ScriptedServer(cuts_the_second) as server:
        await fetch(transport, post(server))
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server))
        assert len(server.requests) == 2


async def test_nor_on_a_new_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(close=True)) as server:
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server))
        assert len(server.requests) == 1


async def test_refused(transport: HTTPTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(httpx2.ConnectError):
        await fetch(transport, httpx2.Request("GET", f"http://127.0.0.1:{port}/"))


async def test_a_name_that_does_not_resolve(transport: HTTPTransport) -> None:
    with pytest.raises(httpx2.ConnectError):
        await fetch(transport, httpx2.Request("GET", "http://nowhere.invalid/"))


async def test_connect_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, but never answers the TLS handshake
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(httpx2.ConnectTimeout):
            await fetch(HTTPTransport(connect_timeout_seconds=0.05), httpx2.Request("GET", url))


async def test_no_tls_on_the_other_side(transport: HTTPTransport) -> None:
    async def speak_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no TLS here\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(speak_plainly, "127.0.0.1", 0) as plain:
        url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}/"
        with pytest.raises(httpx2.ConnectError):
            await fetch(transport, httpx2.Request("GET", url))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that nobody has signed, in one file with its key."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("there is no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    kind = ["-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run([openssl, "req", *kind, *subject, *files], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "certificate.pem").read_text())
    return both


async def test_tls(certificate: Path) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    large = b"x" * 1_000_000
    script = answering(json_answer(large))
    async with ScriptedServer(script, tls=ours) as server, HTTPTransport(ssl_context=trusting) as transport:
        for _ in range(2):
            _, body = await fetch(transport, post(server, large))
            assert body == large
        assert server.connections == 1


async def test_a_certificate_that_is_not_to_be_trusted(certificate: Path, transport: HTTPTransport) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate)
    async with ScriptedServer(answering(json_answer(b"{}")), tls=ours) as server:
        with pytest.raises(httpx2.ConnectError, match="certificate"):
            await fetch(transport, post(server))
        assert not server.requests


async def test_the_bound_on_connections_is_per_origin() -> None:
    async with (
        ScriptedServer(answering(STREAM_HEAD)) as full,
        ScriptedServer(answering(json_answer(b"{}"))) as other,
        HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=0.05) as transport,
    ):
        held = await transport.handle_async_request(post(full))
        with pytest.raises(httpx2.PoolTimeout):
            await fetch(transport, post(full))
        await fetch(transport, post(other))
        await held.aclose()
        await (await transport.handle_async_request(post(full))).aclose()


async def test_a_request_that_fails_or_is_cancelled_keeps_no_place() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = httpx2.Request("GET", f"http://127.0.0.1:{taken.getsockname()[1]}/")
    script = answering()
    async with (
        ScriptedServer(script) as silent,
        HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=0.0) as transport,
    ):
        for _ in range(2):
            with pytest.raises(httpx2.ConnectError):
                await fetch(transport, nobody)
            with pytest.raises(httpx2.ReadTimeout):
                await fetch(transport, post(silent, read=0.01))


async def test_whoever_waits_for_a_connection_gets_the_next_free_one() -> None:
    transport = HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=TIMEOUT_SECONDS)
    async with ScriptedServer(answering(json_answer(b"{}"))) as server:
        await asyncio.gather(*(fetch(transport, post(server)) for _ in range(5)))
        assert server.connections == 1
    await transport.aclose()


async def test_read_timeout_before_the_head_and_in_the_body(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering()) as server:
        with pytest.raises(httpx2.ReadTimeout):
            await fetch(transport, post(server, read=0.05))
        await server.until_the_client_closed()
    async with ScriptedServer(answering(STREAM_HEAD + coded(b"part"))) as server:
        response = await transport.handle_async_request(post(server, read=0.05))
        parts = aiter(pieces(response))
        assert await anext(parts) == b"part"
        with pytest.raises(httpx2.ReadTimeout):
            await anext(parts)
        await server.until_the_client_closed()


@pytest.mark.parametrize(
    "answer",
    [
        json_answer(b"{}").replace(b"content-length: 2", b"content-length: 3"),
        STREAM_HEAD + coded(b"part"),
        STREAM_HEAD + b"ff\r\npart",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"",
    ],
)
@pytest.mark.parametrize("end", [asyncio.StreamWriter.close, reset])
async def test_an_answer_that_is_cut(
    transport: HTTPTransport, answer: bytes, end: Callable[[asyncio.StreamWriter], None]
) -> None:
    async def cut(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        end(writer)

    async with ScriptedServer(cut) as server:
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server))


async def test_what_came_before_the_cut_is_given_first(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(STREAM_HEAD, coded(b"part"), close=True)) as server:
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
     b"HTTP/1.1 200 OK\r\nx: " + b"y" * (module.MAX_HEAD_BYTES + 1)],
)  # fmt: skip
async def test_an_answer_that_is_not_http(transport: HTTPTransport, answer: bytes) -> None:
    async with ScriptedServer(answering(answer)) as server:
        with pytest.raises(httpx2.RemoteProtocolError):
            await fetch(transport, post(server))
        await server.until_the_client_closed()


async def test_an_answer_that_nobody_asked_for_is_given_to_nobody(transport: HTTPTransport) -> None:
    async def twice_the_first_time(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(received.body) * (2 if len(server.requests) == 1 else 1))

    async with ScriptedServer(twice_the_first_time) as server:
        for body in (b"first", b"second"):
            assert (await fetch(transport, post(server, body)))[1] == body


async def test_informational_answers_are_passed_over(transport: HTTPTransport) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n"
    async with ScriptedServer(answering(b"HTTP/1.1 100 Continue\r\n\r\n", early, json_answer(b"{}"))) as server:
        response, body = await fetch(transport, post(server))
        assert (response.status_code, body) == (200, b"{}")
        assert "link" not in response.headers


async def test_cancelling_whoever_waits_for_the_head_closes_the_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering()) as server:
        task = asyncio.create_task(transport.handle_async_request(post(server)))
        await server.until_a_request_arrived()
        assert not server.client_closed
        task.cancel()
        await server.until_the_client_closed()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_cancelling_whoever_reads_closes_the_connection_even_if_nobody_else_does(
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
        await response.aclose()  # safe, and gives the place back once only


async def test_closing_a_response_before_its_end_closes_the_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(STREAM_HEAD)) as server:
        response = await transport.handle_async_request(post(server))
        await response.aclose()
        await server.until_the_client_closed()


async def test_closing_a_response_that_is_whole_keeps_the_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_answer(b"unread"))) as server:
        await (await transport.handle_async_request(post(server))).aclose()
        assert (await fetch(transport, post(server)))[1] == b"unread"
        assert server.connections == 1


async def test_large_bodies_both_ways(transport: HTTPTransport) -> None:
    large = bytes(range(256)) * 40_000  # 10 MB

    async def echo(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(received.body))

    async with ScriptedServer(echo) as server:
        assert (await fetch(transport, post(server, large)))[1] == large
        assert (await fetch(transport, post(server, b"small")))[1] == b"small"
        assert server.connections == 1


async def test_a_reader_that_does_not_keep_up_stops_the_sender(transport: HTTPTransport) -> None:
    """The sender's `drain` must come to wait: it is not let run on until it has sent everything."""
    piece, count = bytes(1024 * 1024), 64
    sent = 0
    stalled = asyncio.Event()

    async def pour(received: Received, writer: asyncio.StreamWriter) -> None:
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

    async with ScriptedServer(pour) as server:
        response = await transport.handle_async_request(post(server))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await stalled.wait()
        assert sent < count
        assert sum([len(part) async for part in pieces(response)]) == len(piece) * count


async def test_a_line_break_in_a_header_is_refused(transport: HTTPTransport) -> None:
    request = httpx2.Request("POST", "http://127.0.0.1:1/", headers=[(b"x", b"a\r\nauthorization: stolen")])
    with pytest.raises(httpx2.LocalProtocolError):
        await transport.handle_async_request(request)


async def test_other_schemes_are_refused(transport: HTTPTransport) -> None:
    with pytest.raises(httpx2.UnsupportedProtocol):
        await transport.handle_async_request(httpx2.Request("GET", "ftp://127.0.0.1/"))


async def test_it_serves_under_an_httpx_client(transport: HTTPTransport) -> None:
    script = answering(json_answer(b'{"a": 1}'))
    async with ScriptedServer(script) as server, httpx2.AsyncClient(transport=transport) as client:
        assert (await client.post(f"{server.base_url}/x", json={})).json() == {"a": 1}


async def test_closing_it_closes_the_idle_connections(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_answer(b"{}"))) as server:
        await fetch(transport, post(server))
        await transport.aclose()
        await server.until_the_client_closed()
