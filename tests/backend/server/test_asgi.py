"""HTTP exchanges on bare ASGI: every way in which a request can end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from backend.server.asgi import DIRECT_WRITE, MAX_BODY_BYTES, Endpoint, HttpExchange, RequestIdMiddleware
from backend.server.errors import BodyTooSlow, InvalidRequest, Overloaded

Answer = Callable[[HttpExchange, bytes], Awaitable[None]]


class Handler(Endpoint):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.closing = asyncio.get_running_loop().create_future()

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        await self._answer(exchange, body)


class Client:
    """The server side of ASGI: delivers scripted messages and records what the app sends."""

    def __init__(self, *messages: Message, headers: dict[str, str] | None = None) -> None:
        self.left = asyncio.Event()
        self.sent: list[Message] = []
        self._messages = list(messages) or [{"type": "http.request", "body": b"{}"}]
        self._headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]

    async def call(self, handler: Endpoint) -> None:
        scope = {"type": "http", "headers": self._headers}
        await RequestIdMiddleware(handler)(scope, self._receive, self._send)

    @property
    def start(self) -> Message:
        return self.sent[0]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.start["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def ended(self) -> bool:
        return not self.sent[-1].get("more_body", False)

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


async def echo(exchange: HttpExchange, body: bytes) -> None:
    await exchange.respond(body)


async def test_a_body_in_pieces_is_read_whole() -> None:
    client = Client({"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.request", "body": b"cd"})
    await client.call(Handler(echo))
    assert client.start["status"] == 200
    assert client.body == b"abcd"
    assert client.headers["content-length"] == "4"


async def test_a_valid_request_id_is_returned_and_an_invalid_one_replaced() -> None:
    client = Client(headers={"x-request-id": "req-1"})
    await client.call(Handler(echo))
    assert client.headers["x-request-id"] == "req-1"
    for bad in ("", "a b", "x" * 129):
        client = Client(headers={"x-request-id": bad})
        await client.call(Handler(echo))
        assert client.headers["x-request-id"] != bad
        assert client.headers["x-request-id"].isalnum()


async def test_a_declared_or_real_size_over_the_cap_is_413() -> None:
    declared = Client(headers={"content-length": str(MAX_BODY_BYTES + 1)})
    piece = {"type": "http.request", "body": bytes(MAX_BODY_BYTES), "more_body": True}
    for client in (declared, Client(piece, {"type": "http.request", "body": b"x", "more_body": True})):
        await client.call(Handler(echo))
        assert client.start["status"] == 413
        assert json.loads(client.body)["error"]["code"] == "body_too_large"


async def test_an_error_before_the_first_byte_is_a_status() -> None:
    async def refuse(exchange: HttpExchange, body: bytes) -> None:
        raise InvalidRequest("no", param="model")

    client = Client()
    await client.call(Handler(refuse))
    assert client.start["status"] == 400
    error = {"message": "no", "type": "invalid_request_error", "param": "model", "code": None}
    assert json.loads(client.body) == {"error": error}


async def test_a_failure_after_the_first_byte_is_an_event_and_the_stream_ends_without_done() -> None:
    async def fail(exchange: HttpExchange, body: bytes) -> None:
        await exchange.stream(b"data: 1\n\n")
        raise Overloaded("full", retry_after_seconds=3)

    client = Client()
    await client.call(Handler(fail))
    first, second, rest = client.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == "overloaded"
    assert client.ended


async def test_an_overload_has_a_retry_after_header() -> None:
    async def fail(exchange: HttpExchange, body: bytes) -> None:
        raise Overloaded("full", retry_after_seconds=3)

    client = Client()
    await client.call(Handler(fail))
    assert client.start["status"] == 503
    assert client.headers["retry-after"] == "3"


async def test_a_disconnect_cancels_the_work_before_and_after_the_first_byte() -> None:
    for streams in (False, True):
        cancelled = asyncio.Event()
        running = asyncio.Event()

        async def work(
            exchange: HttpExchange,
            body: bytes,
            streams: bool = streams,
            running: asyncio.Event = running,
            cancelled: asyncio.Event = cancelled,
        ) -> None:
            if streams:
                await exchange.stream(b"data: 1\n\n")
            running.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        client = Client()
        call = asyncio.create_task(client.call(Handler(work)))
        await running.wait()
        client.left.set()
        await call
        assert cancelled.is_set()
        assert len(client.sent) == (2 if streams else 0)


async def test_a_disconnect_within_the_body_gets_no_response() -> None:
    client = Client({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    await client.call(Handler(echo))
    assert client.sent == []


async def test_a_body_that_does_not_arrive_is_408() -> None:
    class Hasty(Handler):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            exchange = HttpExchange(scope, receive, send)
            with pytest.raises(BodyTooSlow) as caught:
                await exchange.read_body(max_seconds=0)
            await exchange.fail(caught.value)

    client = Client({"type": "http.request", "body": b"{", "more_body": True})
    await client.call(Hasty(echo))
    assert client.start["status"] == 408


async def test_closing_ends_a_response_in_progress_with_an_error() -> None:
    running = asyncio.Event()

    async def work(exchange: HttpExchange, body: bytes) -> None:
        await exchange.stream(b"data: 1\n\n")
        running.set()
        await asyncio.Event().wait()

    client = Client()
    handler = Handler(work)
    call = asyncio.create_task(client.call(handler))
    await running.wait()
    handler.closing.set_result(None)
    await call
    assert b'"code":"shutting_down"' in client.body
    assert b"[DONE]" not in client.body
    assert client.ended


class Connection:
    """What `http_protocol.py` gives to an exchange: writes at once, unless the client reads too slowly."""

    def __init__(self, client: Client) -> None:
        self.has_room = True
        self._client = client

    def write(self, body: bytes) -> bool:
        if not self.has_room or not self._client.sent:
            return False
        self._client.sent.append({"type": "http.response.body", "body": body, "more_body": True})
        return True


@pytest.mark.parametrize("direct", [True, False])
async def test_events_that_are_written_without_waiting_arrive_in_order(direct: bool) -> None:
    client = Client()
    connection = Connection(client)

    async def work(exchange: HttpExchange, body: bytes) -> None:
        exchange.write(b"1")  # before the status is sent
        exchange.write(b"2")
        await asyncio.sleep(0.01)
        exchange.write(b"3")
        connection.has_room = False
        exchange.write(b"4")
        connection.has_room = True
        exchange.write(b"5")  # waits for 4, although there is room again
        await exchange.stream(b"6")
        exchange.write(b"7")
        await exchange.end_stream()

    handler = Handler(work)
    scope: dict[str, Any] = {"type": "http", "headers": []}
    if direct:
        scope["extensions"] = {DIRECT_WRITE: connection.write}
    await RequestIdMiddleware(handler)(scope, client._receive, client._send)
    assert client.start["status"] == 200
    assert client.body == b"1234567"
    assert client.ended


async def test_events_of_a_client_that_has_left_are_dropped_with_the_work() -> None:
    client, running, blocked = Client(), asyncio.Event(), asyncio.Event()

    async def work(exchange: HttpExchange, body: bytes) -> None:
        exchange.write(b"1")
        running.set()
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        await blocked.wait()  # the client does not read

    scope: Scope = {"type": "http", "headers": []}
    call = asyncio.create_task(RequestIdMiddleware(Handler(work))(scope, client._receive, send))
    await running.wait()
    await asyncio.sleep(0)
    client.left.set()
    await call
    assert asyncio.all_tasks() == {asyncio.current_task()}
