"""Heads that proxies and applications might read differently, and requests without a valid host."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.gateway.server.sockets import GET, LAST_GET, TIMEOUT_SECONDS, ask, body, head, replying, serving

UPGRADES = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n",  # Java's HttpClient
    b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    b"upgrade: made-up\r\nconnection: upgrade\r\n",
]
SMUGGLED = b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


def recording(seen: list[tuple[str, bytes, dict[bytes, bytes]]]) -> ASGIApp:
    """An application that notes each request's path, body and headers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        content, more = b"", True
        while more:
            message = await receive()
            content, more = content + message.get("body", b""), message.get("more_body", False)
        seen.append((scope["path"], content, dict(scope["headers"])))
        await send(head(200, (b"content-length", b"2")))
        await send(body(b"ok"))

    return app


@pytest.mark.parametrize("offer", UPGRADES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("coded", [False, True])
async def test_an_offered_upgrade_is_declined_and_the_body_stays_a_body(offer: bytes, apart: bool, coded: bool) -> None:
    seen: list[tuple[str, bytes, dict[bytes, bytes]]] = []
    framing = b"transfer-encoding: chunked\r\n" if coded else b"content-length: %d\r\n" % len(SMUGGLED)
    content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED) if coded else SMUGGLED
    request = b"POST /first HTTP/1.1\r\nhost: x\r\n" + offer + framing + b"\r\n"
    async with serving(recording(seen)) as port, asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        if apart:
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.write(content + LAST_GET)
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 2
        writer.close()
    assert [(path, content) for path, content, _ in seen] == [("/first", SMUGGLED), ("/", b"")]
    assert b"upgrade" not in seen[0][2] and b"upgrade" not in seen[0][2].get(b"connection", b"").lower()


async def test_connect_is_refused() -> None:
    async with serving(replying(head(), body(b"hi"))) as port:
        assert (await ask(port, b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n" + GET)).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"", b"no Host header"),
        (b"host: a\r\nhost: a\r\n", b"more than one Host header"),
        (b"host: a b\r\n", b"not a host"),
        (b"host: a, b\r\n", b"not a host"),
        (b"host: user@a\r\n", b"not a host"),
        (b"host: a/b\r\n", b"not a host"),
        (b"host: a:port\r\n", b"not a host"),
        (b"host: [::1\r\n", b"not a host"),
        (b"host: x\xc3\xa9\r\n", b"not a host"),
    ],
)
async def test_a_wrong_host_is_refused(lines: bytes, why: bytes) -> None:
    async with serving(replying(head(200, (b"content-length", b"2")), body(b"hi"))) as port:
        reply = await ask(port, b"GET / HTTP/1.1\r\n" + lines + b"\r\n" + GET)  # the second one gets no reply
    assert reply.startswith(b"HTTP/1.1 400 ") and why in reply and b"connection: close" in reply
    assert reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("host", [b"", b"a", b"a_b:8080", b"10.0.0.1:80", b"[::1]:8080", b"[fe80::1%25eth0]", b"a.b."])
async def test_a_right_host_is_served(host: bytes) -> None:
    async with serving(replying(head(200, (b"content-length", b"2")), body(b"hi"))) as port:
        assert (await ask(port, b"GET / HTTP/1.1\r\nhost: %b\r\n\r\n" % host, until=b"hi")).startswith(b"HTTP/1.1 200 ")


async def test_http_1_0_needs_no_host() -> None:
    async with serving(replying(head(200, (b"content-length", b"2")), body(b"hi"))) as port:
        assert (await ask(port, b"GET / HTTP/1.0\r\n\r\n")).endswith(b"hi")


async def test_trailers_are_no_headers() -> None:
    seen: list[tuple[str, bytes, dict[bytes, bytes]]] = []
    request = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(recording(seen)) as port:
        await ask(port, request + b"1\r\na\r\n0\r\nauthorization: Bearer forged\r\n\r\n")
    assert seen[0][1] == b"a" and b"authorization" not in seen[0][2]
