"""Replies as they look on the socket, from uvicorn with our protocol around small applications."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.endpoints.wire import WIRE, Wire
from gateway.server import http_protocol
from gateway.server.http_protocol import Connections
from tests.gateway.server.sockets import GET, LAST_GET, MUCH, TIMEOUT_SECONDS, ask, body, head, replying, serving


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
