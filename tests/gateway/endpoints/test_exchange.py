"""The ASGI border by itself; how requests end on it is in `test_serve` and `test_settlement`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.core.errors import (
    BodyTooLarge,
    GatewayError,
    InternalError,
    LimitReached,
    Overloaded,
    RequestTimeout,
    UpstreamCut,
    UpstreamRefused,
)
from gateway.endpoints import wire
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.exchange import CLIENT_CLOSED_STATUS, Exchange
from gateway.endpoints.request_body import BodyBudget
from gateway.endpoints.wire import ClientGone
from tests.gateway.harness import Client, in_time, settle


class Loud(ChatEndpoint):
    """The translator of a wire that is OpenAI's in capital letters, without comments."""

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        return {"x-loud": named["x-request-id"].upper()}

    def pass_answer(self) -> None:
        raise NotImplementedError

    def answer(self, body: bytes) -> bytes:
        return body.upper()

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        if chunk == b"unreadable":
            raise UpstreamCut("unreadable")
        return b"" if chunk.startswith(b":") else chunk.upper() + (b"!" if last else b"")

    def error_response(self, error: GatewayError) -> tuple[int, bytes] | None:
        return None if isinstance(error, UpstreamRefused) else (error.status + 1, error.message.upper().encode())

    def error_frames(self, error: GatewayError) -> bytes:
        return error.message.upper().encode()


def an_exchange(
    client: Client, *, max_body_bytes: int = 100, bodies: BodyBudget | None = None, translator: Loud | None = None
) -> Exchange:
    room = bodies or BodyBudget(1000)
    exchange = Exchange(
        client.scope, client.receive, client.send, max_body_bytes=max_body_bytes, bodies=room, translator=translator
    )
    exchange.reply_headers["x-request-id"] = "req_1"
    return exchange


async def watched(exchange: Exchange, until: asyncio.Event) -> None:
    exchange.watch()
    try:
        await until.wait()
    finally:
        exchange.close()


@pytest.mark.parametrize("parts", [[b"abc"], [b"a", b"bc"], [b"", b"abc", b""]])
async def test_a_body_in_any_pieces(parts: list[bytes]) -> None:
    exchange = an_exchange(Client(parts))
    assert await exchange.body() == b"abc"
    exchange.close()


@pytest.mark.parametrize("parts", [[b"x" * 101], [b"x" * 60, b"x" * 60], [b"x" * 60, b"x" * 60, b"x" * 60]])
async def test_a_body_over_the_cap(parts: list[bytes]) -> None:
    client = Client(parts)
    exchange = an_exchange(client)
    with pytest.raises(BodyTooLarge, match="100 bytes"):
        await exchange.body()
    exchange.close()


async def test_a_body_over_the_cap_is_read_no_further() -> None:
    client = Client([b"x" * 60] * 20)
    exchange = an_exchange(client)
    with pytest.raises(BodyTooLarge):
        await exchange.body()
    exchange.close()
    assert len(client._body) == 20 - 2


async def test_an_announced_body_over_the_cap_is_refused_unread() -> None:
    client = Client([b"x" * 101])
    client.scope["headers"] = [(b"content-length", b"101")]
    exchange = an_exchange(client)
    with pytest.raises(BodyTooLarge, match="100 bytes"):
        exchange.check_announced_body()
    exchange.close()
    assert client._body != []


@pytest.mark.parametrize("parts", [[b"x" * 60], [b"x" * 30, b"x" * 30]])
async def test_bodies_share_a_room_until_each_exchange_is_over(parts: list[bytes]) -> None:
    bodies = BodyBudget(100)
    first, second, third = (an_exchange(Client(list(parts)), bodies=bodies) for _ in range(3))
    await first.body()
    with pytest.raises(Overloaded) as refused:
        await second.body()
    assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
    second.close()
    assert bodies.held_bytes == 60
    first.close()
    first.close()
    assert await third.body() == b"x" * 60
    third.close()
    assert bodies.held_bytes == 0


async def test_what_is_announced_and_finds_no_room_is_not_kept_and_takes_no_room() -> None:
    bodies, client = BodyBudget(100), Client([b"x" * 60, None])
    client.scope["headers"] = [*client.scope["headers"], (b"content-length", b"90")]
    sender = an_exchange(client, bodies=bodies)
    sending = asyncio.create_task(sender.body())  # of 90 bytes, 60 have come
    await settle()
    assert bodies.held_bytes == 60
    asking = Client([])
    asking.scope["headers"] = [(b"content-length", b"41"), (b"expect", b"100-continue")]
    refused = an_exchange(asking, bodies=bodies)
    with pytest.raises(Overloaded):
        await refused.body()
    refused.close()
    sending.cancel()
    await asyncio.wait([sending])
    sender.close()
    assert bodies.held_bytes == 0


async def test_a_body_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL_SECONDS", 0.02)
    exchange = an_exchange(Client([b"x", None]))
    with pytest.raises(RequestTimeout):
        await in_time(exchange.body())
    exchange.close()


async def test_a_body_whose_sender_leaves() -> None:
    client = Client([b"x", None])
    exchange = an_exchange(client)
    reading = asyncio.create_task(exchange.body())
    await settle()
    client.leave()
    with pytest.raises(ClientGone):
        await in_time(reading)
    exchange.close()
    assert exchange.client_gone


async def test_the_task_is_cancelled_when_the_client_leaves() -> None:
    client, never = Client(), asyncio.Event()
    exchange = an_exchange(client)
    await exchange.body()
    task = asyncio.create_task(watched(exchange, never))
    await settle()
    client.leave()
    with pytest.raises(asyncio.CancelledError):
        await in_time(task)
    assert exchange.client_gone


async def test_it_works_on_while_it_is_wanted() -> None:
    client, never, wanted = Client(), asyncio.Event(), True
    exchange = an_exchange(client)
    exchange.stay_while(lambda: wanted)
    await exchange.body()
    task = asyncio.create_task(watched(exchange, never))
    await settle()
    client.leave()
    await settle()
    assert exchange.client_gone and not task.done()
    exchange.leave_if_gone()
    await settle()
    assert not task.done()
    wanted = False
    exchange.leave_if_gone()
    with pytest.raises(asyncio.CancelledError):
        await in_time(task)


async def test_the_last_bytes_end_the_watch() -> None:
    """ASGI servers report a disconnect once the reply is complete."""
    client, done = Client(), asyncio.Event()
    exchange = an_exchange(client)
    await exchange.body()
    task = asyncio.create_task(watched(exchange, done))
    await settle()
    await exchange.reply(200, b"{}")
    await settle()
    assert client.whole and not task.done() and not exchange.client_gone
    done.set()
    await in_time(task)


async def test_an_error_is_a_status_before_the_first_byte_and_an_event_after_it() -> None:
    before, after = Client(), Client()
    for client in (before, after):
        exchange = an_exchange(client)
        if client is after:
            await exchange.start(200, "text/event-stream")
        await exchange.refuse(LimitReached("later", retry_after_seconds=2))
        exchange.close()
        assert client.whole and client.headers["x-request-id"] == "req_1"
    assert before.status == 429 and before.headers["retry-after-ms"] == "2000"
    assert before.json["error"] == {
        "message": "later", "type": "requests", "param": None, "code": "rate_limit_exceeded",
    }  # fmt: skip
    assert after.status == 200 and after.content.startswith(b'data: {"error":') and after.content.endswith(b"\n\n")


async def test_behind_a_whole_reply_there_is_nothing_to_refuse() -> None:
    client = Client()
    exchange = an_exchange(client)
    await exchange.reply(200, b"{}")
    await exchange.refuse(InternalError("too late"))
    exchange.close()
    assert (client.status, client.content) == (200, b"{}")


@pytest.mark.parametrize(
    ("content", "content_type", "message"),
    [
        (b'{"error": {"message": "no"}}', "application/json; charset=utf-8", "no"),
        (b"not today", "text/plain", "the upstream returned status 400: not today"),
        (b"\xff" * 10_000, "application/octet-stream", "the upstream returned status 400: " + "\ufffd" * 300),
    ],
)
async def test_an_upstreams_refusal_is_always_json(content: bytes, content_type: str, message: str) -> None:
    client = Client()
    exchange = an_exchange(client)
    await exchange.refuse(UpstreamRefused(400, content, content_type))
    exchange.close()
    assert client.headers["content-type"] == "application/json"
    assert client.json["error"]["message"] == message


async def test_a_client_that_is_gone_gets_nothing_and_is_not_waited_for() -> None:
    client = Client()
    exchange = an_exchange(client)
    exchange.client_gone = True
    await exchange.start(200, "text/event-stream")
    await exchange.send(b"data")
    await exchange.refuse(UpstreamCut("cut"))
    exchange.close()
    assert client.status == 0 and exchange.status == CLIENT_CLOSED_STATUS


async def test_a_refusal_waits_for_a_client_that_takes_nothing_no_longer_than_a_reply_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "STALL_SECONDS", 0.02)
    client = Client()
    client.takes = asyncio.Event()
    exchange = an_exchange(client)

    async def refuse() -> Any:
        await exchange.refuse(InternalError("no"))

    with pytest.raises(asyncio.CancelledError):
        await in_time(asyncio.create_task(refuse()))
    exchange.close()
    assert exchange.client_gone


async def test_what_leaves_by_a_door_of_another_wire_is_in_its_words() -> None:
    whole, stream = Client(), Client()
    exchange = an_exchange(whole, translator=Loud())
    await exchange.reply(200, b"answer")
    exchange.close()
    assert (whole.content, whole.headers["x-loud"]) == (b"ANSWER", "REQ_1")
    exchange = an_exchange(stream, translator=Loud())
    await exchange.start(200, "text/event-stream")
    for chunk in (b"a", b": comment", b"b"):
        assert exchange.put(chunk)
    await exchange.send(b"c", last=True)
    exchange.close()
    assert (stream.chunks, stream.whole, stream.headers["x-loud"]) == ([b"A", b"B", b"C!"], True, "REQ_1")


async def test_errors_at_a_door_of_another_wire_are_in_its_words_where_it_has_any() -> None:
    before, after, upstream = Client(), Client(), Client()
    exchange = an_exchange(before, translator=Loud())
    await exchange.refuse(LimitReached("later", retry_after_seconds=2))
    exchange.close()
    assert (before.status, before.content, before.headers["retry-after-ms"]) == (430, b"LATER", "2000")
    exchange = an_exchange(upstream, translator=Loud())
    await exchange.refuse(UpstreamRefused(400, b'{"error": {"message": "no"}}', "application/json"))
    exchange.close()
    assert (upstream.status, upstream.json["error"]["message"]) == (400, "no")
    exchange = an_exchange(after, translator=Loud())
    await exchange.start(200, "text/event-stream")
    await exchange.send(b"a")
    await exchange.refuse(UpstreamCut("cut"))
    exchange.close()
    assert (after.chunks, after.whole) == ([b"A", b"CUT"], True)


async def test_what_can_not_be_put_into_the_words_of_a_wire_is_told_as_a_failure() -> None:
    client = Client()
    exchange = an_exchange(client, translator=Loud())
    await exchange.start(200, "text/event-stream")
    with pytest.raises(UpstreamCut) as failed:
        await exchange.send(b"unreadable", last=True)
    await exchange.refuse(failed.value)
    exchange.close()
    assert (client.chunks, client.whole) == ([b"UNREADABLE"], True)
