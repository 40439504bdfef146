"""HTTPTransport: requests, responses, TLS, and the one case in which a request is sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import trustme

from gateway.policy import UpstreamTLS
from gateway.providers.request_progress import REQUEST_PROGRESS
from gateway.providers.transport import TLS_EXTENSION, HTTPTransport, UnusableFile, tls_context
from gateway.providers.transport.client import STALE_SECONDS
from gateway.providers.transport.origin_pool import OriginPool
from tests.gateway.providers.scripted_server import (
    STREAM_HEAD,
    TIMEOUT_SECONDS,
    ReceivedRequest,
    ScriptedServer,
    json_response,
)
from tests.gateway.providers.transport.exchanges import answering, fetch, pieces, post
from tests.ports import refusing_port


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


async def test_a_request_is_unsent_until_it_has_a_connection(
    transport: HTTPTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[bool] = []

    async def notes(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        states.append(progress.unsent)
        writer.write(json_response(b"{}"))

    progress = SimpleNamespace(unsent=False)
    REQUEST_PROGRESS.set(progress)
    connect = OriginPool.connect

    async def noted(self: OriginPool, timeout_seconds: float | None) -> Any:
        states.append(progress.unsent)
        return await connect(self, timeout_seconds)

    monkeypatch.setattr(OriginPool, "connect", noted)
    async with ScriptedServer(notes) as server:
        await fetch(transport, post(server, b"first"))
        await fetch(transport, post(server, b"on the same connection"))
    assert states == [True, False, False]


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
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path) -> UpstreamTLS:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return UpstreamTLS(ca=str(tmp_path / "ca.pem"))


def serving_as(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    return context


def post_by(server: ScriptedServer, tls: UpstreamTLS, body: bytes = b"{}") -> httpx2.Request:
    return httpx2.Request("POST", server.base_url, content=body, extensions={TLS_EXTENSION: tls})


async def test_tls(authority: trustme.CA, trusted: UpstreamTLS, transport: HTTPTransport) -> None:
    ours = serving_as(authority.issue_cert("127.0.0.1"))
    large = b"x" * 1_000_000
    async with ScriptedServer(answering(json_response(large)), tls=ours) as server:
        for _ in range(2):
            _, body = await fetch(transport, post_by(server, trusted, large))
            assert body == large
        assert server.connections == 1


@pytest.mark.parametrize(
    ("host", "known", "why"),
    [
        (
            "127.0.0.1",
            False,
            "the certificate of 127.0.0.1:.* is not valid: .*(self-signed|unable to get local issuer)",
        ),
        ("elsewhere.test", True, "the certificate of 127.0.0.1:.* is not valid: IP address mismatch"),
    ],
)
async def test_an_untrusted_certificate_is_rejected(
    authority: trustme.CA, trusted: UpstreamTLS, transport: HTTPTransport, host: str, known: bool, why: str
) -> None:
    ours = serving_as(authority.issue_cert(host))
    async with ScriptedServer(answering(json_response(b"{}")), tls=ours) as server:
        with pytest.raises(httpx2.ConnectError, match=why):
            await fetch(transport, post_by(server, trusted) if known else post(server))
        assert not server.requests


async def test_connections_of_other_authorities_are_not_reused(
    authority: trustme.CA, trusted: UpstreamTLS, transport: HTTPTransport
) -> None:
    async with ScriptedServer(
        answering(json_response(b"{}")), tls=serving_as(authority.issue_cert("127.0.0.1"))
    ) as one:
        await fetch(transport, post_by(one, trusted))
        with pytest.raises(httpx2.ConnectError, match="not valid"):
            await fetch(transport, post(one))


async def test_a_client_certificate(
    authority: trustme.CA, trusted: UpstreamTLS, transport: HTTPTransport, tmp_path: Path
) -> None:
    ours = serving_as(authority.issue_cert("127.0.0.1"))
    authority.configure_trust(ours)
    ours.verify_mode = ssl.CERT_REQUIRED
    mine = authority.issue_cert("gateway.test")
    mine.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    presenting = trusted.model_copy(update={"cert": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")})
    async with ScriptedServer(answering(json_response(b"{}")), tls=ours) as server:
        assert (await fetch(transport, post_by(server, presenting)))[1] == b"{}"


async def test_a_refused_client_is_told_why(
    authority: trustme.CA, trusted: UpstreamTLS, transport: HTTPTransport
) -> None:
    ours = serving_as(authority.issue_cert("127.0.0.1"))
    ours.verify_mode = ssl.CERT_REQUIRED
    told = threading.Event()
    with ours.wrap_socket(
        socket.create_server(("127.0.0.1", 0)), server_side=True, do_handshake_on_connect=False
    ) as server:

        def refuse() -> None:
            connection, _ = server.accept()
            with connection:
                with contextlib.suppress(ssl.SSLError):
                    connection.do_handshake()  # the client gets the reason; asyncio's servers only close
                told.wait(TIMEOUT_SECONDS)

        request = httpx2.Request(
            "GET", f"https://127.0.0.1:{server.getsockname()[1]}/", extensions={TLS_EXTENSION: trusted}
        )
        refusing = asyncio.get_running_loop().run_in_executor(None, refuse)
        with pytest.raises(httpx2.ConnectError, match=r"TLS failed: .*certificate required"):
            await fetch(transport, request)
        told.set()
        await refusing


@pytest.mark.parametrize(
    ("files", "field", "why"),
    [
        ({"ca": "absent"}, "ca", "absent: no such file"),
        ({"ca": "text"}, "ca", "text: no certificate"),
        ({"cert": "text"}, "cert", "text: "),
        ({"cert": "ca", "key": "text"}, "key", "ca with text: "),
    ],
)
def test_unusable_files_are_named(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], field: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no certificate")
    authority.cert_pem.write_to_path("ca")
    with pytest.raises(UnusableFile) as unusable:
        tls_context(UpstreamTLS(**files))
    assert unusable.value.field == field and why in str(unusable.value)


async def test_a_failed_request_gives_its_slot_back() -> None:
    with refusing_port() as port:
        async with (
            ScriptedServer(answering()) as silent,
            HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=0.0) as transport,
        ):
            for _ in range(2):
                with pytest.raises(httpx2.ConnectError):
                    await fetch(transport, httpx2.Request("GET", f"http://127.0.0.1:{port}/"))
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


async def test_the_pool_of_a_removed_server_is_freed(transport: HTTPTransport) -> None:
    for _ in range(3):  # as pods that come and go
        async with ScriptedServer(answering(json_response(b"{}"))) as server:
            await fetch(transport, post(server))
            assert len(transport._pools) == 1, "an idle connection keeps it"
        while transport._pools:
            gc.collect()
            await asyncio.sleep(0.01)
