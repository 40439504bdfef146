"""HTTPTransport: requests, responses, TLS, and the one case in which a request is sent twice."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx2
import pytest

from gateway.providers.transport import HTTPTransport
from gateway.providers.transport.client import STALE_SECONDS
from tests.gateway.providers.scripted_server import STREAM_HEAD, ReceivedRequest, ScriptedServer, json_response
from tests.gateway.providers.transport.exchanges import answering, fetch, pieces, post


async def test_status_headers_and_body_are_unchanged(transport: HTTPTransport) -> None:
    answer = json_response(b"\x1f\x8b raw", "418 Teapot", "content-encoding: gzip", "X-Cased: Caf\xe9")
    async with ScriptedServer(answering(answer.replace("é".encode(), b"\xe9"))) as server:
        response = await transport.handle_async_request(post(server, b'{"a": 1}'))
        parts = [part async for part in pieces(response)]
    assert response.status_code == 418
    assert (b"X-Cased", b"Caf\xe9") in response.headers.raw
    assert b"".join(parts) == b"\x1f\x8b raw"
    assert server.requests[0].head == "POST /v1/x HTTP/1.1"
    assert server.requests[0].body == b'{"a": 1}'


async def test_a_request_is_sent_again_if_the_server_closed_the_idle_connection(
    transport: HTTPTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.providers.transport.client.STALE_SECONDS", 10.0)  # even on a slow machine

    async def closes_on_the_second(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.close()
        else:
            writer.write(json_response(b"{}"))

    async with ScriptedServer(closes_on_the_second) as server:
        await fetch(transport, post(server, b"first"))
        await fetch(transport, post(server, b"second"))
        assert [r.body for r in server.requests] == [b"first", b"second", b"second"]
        assert [r.connection for r in server.requests] == [0, 0, 1]


async def test_a_request_is_not_sent_again_if_the_server_may_have_started_to_work(transport: HTTPTransport) -> None:
    async def closes_on_the_second(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            await asyncio.sleep(2 * STALE_SECONDS)
            writer.close()
        else:
            writer.write(json_response(b"{}"))

    async with ScriptedServer(closes_on_the_second) as server:
        await fetch(transport, post(server, b"first"))
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server, b"second"))
        assert [r.connection for r in server.requests] == [0, 0]


async def test_a_request_is_not_sent_again_once_a_byte_of_the_response_has_arrived(transport: HTTPTransport) -> None:
    async def cuts_the_second(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200" if len(server.requests) == 2 else json_response(b"{}"))
        if len(server.requests) == 2:
            await writer.drain()
            writer.close()

    async with ScriptedServer(cuts_the_second) as server:
        await fetch(transport, post(server))
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server))
        assert len(server.requests) == 2


async def test_a_request_on_a_new_connection_is_not_sent_again(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(close=True)) as server:
        with pytest.raises(httpx2.ReadError):
            await fetch(transport, post(server))
        assert len(server.requests) == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, in one file with its key."""
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
    script = answering(json_response(large))
    async with ScriptedServer(script, tls=ours) as server, HTTPTransport(ssl_context=trusting) as transport:
        for _ in range(2):
            _, body = await fetch(transport, post(server, large))
            assert body == large
        assert server.connections == 1


async def test_an_untrusted_certificate_is_rejected(certificate: Path, transport: HTTPTransport) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate)
    async with ScriptedServer(answering(json_response(b"{}")), tls=ours) as server:
        with pytest.raises(httpx2.ConnectError, match="certificate"):
            await fetch(transport, post(server))
        assert not server.requests


async def test_a_failed_request_gives_its_slot_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        unreachable = httpx2.Request("GET", f"http://127.0.0.1:{taken.getsockname()[1]}/")
    script = answering()
    async with (
        ScriptedServer(script) as silent,
        HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=0.0) as transport,
    ):
        for _ in range(2):
            with pytest.raises(httpx2.ConnectError):
                await fetch(transport, unreachable)
            with pytest.raises(httpx2.ReadTimeout):
                await fetch(transport, post(silent, read=0.01))


async def test_closing_a_response_before_its_end_closes_the_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(STREAM_HEAD)) as server:
        response = await transport.handle_async_request(post(server))
        await response.aclose()
        await server.until_the_client_closed()


async def test_closing_a_complete_response_keeps_the_connection(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_response(b"unread"))) as server:
        await (await transport.handle_async_request(post(server))).aclose()
        assert (await fetch(transport, post(server)))[1] == b"unread"
        assert server.connections == 1


async def test_a_line_break_in_a_header_is_rejected(transport: HTTPTransport) -> None:
    request = httpx2.Request("POST", "http://127.0.0.1:1/", headers=[(b"x", b"a\r\nauthorization: stolen")])
    with pytest.raises(httpx2.LocalProtocolError):
        await transport.handle_async_request(request)


async def test_other_schemes_are_rejected(transport: HTTPTransport) -> None:
    with pytest.raises(httpx2.UnsupportedProtocol):
        await transport.handle_async_request(httpx2.Request("GET", "ftp://127.0.0.1/"))


async def test_an_httpx_client_can_use_the_transport(transport: HTTPTransport) -> None:
    script = answering(json_response(b'{"a": 1}'))
    async with ScriptedServer(script) as server, httpx2.AsyncClient(transport=transport) as client:
        assert (await client.post(f"{server.base_url}/x", json={})).json() == {"a": 1}


async def test_closing_the_transport_closes_the_idle_connections(transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_response(b"{}"))) as server:
        await fetch(transport, post(server))
        await transport.aclose()
        await server.until_the_client_closed()
