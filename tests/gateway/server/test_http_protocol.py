"""Replies as they look on the socket, from uvicorn with our protocol around small applications."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.endpoints.wire import WIRE, Wire
from gateway.server import http_protocol
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


async def test_a_reply_of_known_length() -> None:
    async with serving(replying(head(200, (b"content-length", b"2"), (b"x-a", b"1")), body(b"hi"))) as port:
        assert await ask(port, GET, until=b"hi") == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-a: 1\r\n\r\nhi"


async def test_head_and_first_bytes_leave_together() -> None:
    reader, writer = None, None
    async with serving(replying(head(200, (b"content-length", b"2")), body(b"hi"))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert (await reader.read(65536)).endswith(b"\r\n\r\nhi")
        writer.close()


async def test_a_stream() -> None:
    messages = [head(200), body(b"one", True), body(b"", True), body(b"two", True), body(b"")]
    async with serving(replying(*messages)) as port:
        reply = await ask(port, GET, until=b"0\r\n\r\n")
    assert reply == (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"3\r\none\r\n" + b"3\r\ntwo\r\n" + b"0\r\n\r\n"
    )


async def test_kept_alive_pipelined_and_closed() -> None:
    async with serving(replying(head(200, (b"content-length", b"2")), body(b"hi"))) as port:
        reply = await ask(port, GET, GET, LAST_GET)
    assert reply.count(b"HTTP/1.1 200 OK") == 3
    assert reply.count(b"connection: close") == 1
    assert reply.endswith(b"connection: close\r\n\r\nhi")


@pytest.mark.parametrize(
    ("request_line", "message", "expected"),
    [
        (b"HEAD / HTTP/1.1", head(200, (b"content-length", b"2")), b"content-length: 2\r\nconnection: close\r\n\r\n"),
        (b"GET / HTTP/1.1", head(204), b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"),
    ],
)
async def test_replies_without_a_body(request_line: bytes, message: Message, expected: bytes) -> None:
    async with serving(replying(message, body(b""))) as port:
        assert (await ask(port, request_line, b"\r\nhost: x\r\nconnection: close\r\n\r\n")).endswith(expected)


async def test_an_application_may_close_the_connection() -> None:
    async with serving(replying(head(200, (b"connection", b"close"), (b"content-length", b"2")), body(b"hi"))) as port:
        assert (await ask(port, GET)).count(b"connection: close") == 1


@pytest.mark.parametrize("value", [b"a\r\nx-forged: 1", b"a\nx-forged: 1", b"a\rb", b"a\0b"])
async def test_a_header_can_not_smuggle_another(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(replying(head(200, (b"x-a", value)), body(b"hi"))) as port:
        reply = await ask(port, LAST_GET)
    assert b"x-forged" not in reply
    assert not reply.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("content", [b"longer than two", b"1"])
async def test_a_wrong_length_ends_the_connection(content: bytes) -> None:
    async with serving(replying(head(200, (b"content-length", b"2")), body(content))) as port:
        assert await ask(port, GET) in (b"", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")


async def test_what_does_not_fit_is_sent_when_there_is_room() -> None:
    said: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        wire: Wire = scope["extensions"][WIRE]
        await receive()
        length = len(MUCH) + 2
        said.append(wire.begin(200, b"content-length: %d\r\n" % length, length=length, close=False))
        said.append(wire.write(MUCH, False))
        said.append(wire.write(b"hi", True))  # the client has not read yet
        await send(body(b"hi"))

    async with serving(app) as port:
        reply = await ask(port, LAST_GET)
    assert said == [True, True, False]
    assert reply.endswith(b"xxhi")


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_body_is_there_at_once_only_if_it_came_with_its_head(at_once: bool) -> None:
    found: list[bytes | None] = []
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        wire: Wire = scope["extensions"][WIRE]
        found.append(wire.whole_body())
        begun.set()
        while not at_once and (message := await receive())["more_body"]:
            found.append(message["body"])
        await send(head(200, (b"content-length", b"2")))
        await send(body(b"hi"))

    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbo"
    async with serving(app) as port, asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + b"dy" if at_once else request)
        await begun.wait()
        writer.write(b"" if at_once else b"dy")
        assert (await reader.read()).endswith(b"hi")
        writer.close()
    assert found[0] == (b"body" if at_once else None)


async def test_a_body_in_many_parts_arrives_whole() -> None:
    """Also the parts that arrive before the application reads, which are joined."""
    found = bytearray()
    may_read = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_read.wait()
        more = True
        while more:
            message = await receive()
            found.extend(message["body"])
            more = message["more_body"]
        await send(head(200, (b"content-length", b"2")))
        await send(body(b"hi"))

    parts = [bytes([97 + number]) * 1000 for number in range(10)]
    async with serving(app) as port, asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\nconnection: close\r\n\r\n")
        for number, part in enumerate(parts):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)  # so that the server reads each part by itself
            if number == 5:
                may_read.set()
        assert (await reader.read()).endswith(b"hi")
        writer.close()
    assert bytes(found) == b"".join(parts)


async def test_a_client_that_leaves_is_told_of_once_and_only_to_who_wants_to_know() -> None:
    told: list[str] = []
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        wire: Wire = scope["extensions"][WIRE]
        await receive()

        def when_gone() -> None:
            told.append("second")
            left.set()

        wire.when_gone(lambda: told.append("first"))
        wire.when_gone(None)
        wire.when_gone(when_gone)
        await send(head(200))
        await send(body(b"hi", True))
        await left.wait()
        wire.when_gone(lambda: told.append("late"))
        await send(body(b""))

    async with serving(app) as port, asyncio.timeout(TIMEOUT_SECONDS):
        await ask(port, GET, until=b"hi\r\n")
        await left.wait()
    assert told == ["second", "late"]


async def test_a_head_that_trickles_is_given_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    async with serving(replying(head(), body(b"hi"))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = 0
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not reader.at_eof():
                with contextlib.suppress(ConnectionError):
                    writer.write(b"GET / HTTP/1.1\r\n"[sent : sent + 1] or b"x")
                    await writer.drain()
                sent += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        received = await reader.read(1000)
                        break
        assert received.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_head_without_end_is_refused() -> None:
    async with serving(replying(head(), body(b"hi"))) as port:
        long = b"GET / HTTP/1.1\r\n" + b"x-a: " + b"a" * http_protocol.MAX_HEAD_BYTES
        assert (await ask(port, long)).startswith(b"HTTP/1.1 431 ")


async def test_a_silent_connection_is_closed_and_a_slow_body_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send(head())
        await send(body(b"whole"))

    async with serving(app) as port:
        assert await ask(port) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1")
        for part in (b"\r\na\r\n", b"1\r\n", b"b\r\n", b"0\r\n\r\n"):
            await asyncio.sleep(0.15)
            writer.write(part)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert b"whole" in await reader.readuntil(b"whole")
        writer.close()


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    """The time stands still while a request is answered, however long that takes."""
    busy = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(busy.wait(), 0.3)
        await replying(head(200, (b"content-length", b"2")), body(b"ok"))(scope, receive, send)

    async with serving(app, keep_alive_seconds=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for path in (b"/", b"/slow"):  # three times as long as it may be idle
                writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            assert await reader.read() == b""  # for it is closed
        writer.close()


async def test_who_leaves_closes_each_connection_behind_its_reply() -> None:
    connections = Connections()
    async with serving(replying(head(200, (b"content-length", b"2")), body(b"hi")), connections) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert b"connection: close" not in await reader.readuntil(b"hi")
        connections.leaving = True
        writer.write(GET)
        assert b"connection: close" in await reader.read()
        writer.close()


async def test_one_connection_too_many_is_told_so() -> None:
    async with serving(replying(head(), body(b"hi")), Connections(1)) as port:
        _, first = await asyncio.open_connection("127.0.0.1", port)
        first.write(GET)
        assert (await ask(port)).startswith(b"HTTP/1.1 503 ")
        first.close()


# Heads that proxies and applications might read differently


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


# Replies before the end of the request


def refusing(status: int = 413) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head(status, (b"content-length", b"2")))
        await send(body(b"no"))

    return app


@pytest.mark.parametrize("last", [False, True])
async def test_a_body_is_dropped_after_an_early_reply_so_that_its_sender_reads_it(last: bool) -> None:
    closing = b"connection: close\r\n" if last else b""
    request = b"POST / HTTP/1.1\r\nhost: x\r\n" + closing + b"content-length: %d\r\n\r\n" % len(MUCH)
    async with serving(refusing()) as port, asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + MUCH)
        await writer.drain()  # all of it, before the first byte is read
        if last:
            assert (await reader.read()).endswith(b"no")
        else:
            await reader.readuntil(b"no")
            writer.write(LAST_GET)
            assert (await reader.read()).startswith(b"HTTP/1.1 413")  # the connection stays in use
        writer.close()


@pytest.mark.parametrize("framing", [b"content-length: 1000000", b"transfer-encoding: chunked"])
async def test_no_body_is_dropped_for_ever(monkeypatch: pytest.MonkeyPatch, framing: bytes) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_MAX_BYTES", 1000)
    async with serving(refusing()) as port, asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n")
        await reader.readuntil(b"no")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()


async def test_nobody_is_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.1)
    async with serving(refusing()) as port:
        reply = await ask(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")  # until it is closed
    assert reply.endswith(b"no")


async def test_who_asks_before_sending_a_body_and_is_refused_may_not_go_on() -> None:
    request = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 10\r\n\r\n"
    async with serving(refusing()) as port, asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        reply = await reader.readuntil(b"no")
        assert b"connection: close" in reply and b"100 Continue" not in reply
        assert await reader.read() == b""
        writer.close()
