"""The contract of the provider port, run over every provider: cut, malformed and oversized responses, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from gateway.providers import Fault
from tests.contract.provider_calls import DEEP, VERBATIM, ProviderFor, answer, answering, call, failure
from tests.gateway.providers.scripted_server import (
    STREAM_END,
    STREAM_HEAD,
    TIMEOUT_SECONDS,
    ScriptedServer,
    chunked,
    json_response,
    reset,
)
from tests.gateway.providers.wires import Wire, timeless


@pytest.mark.parametrize("end", [asyncio.StreamWriter.close, reset], ids=["closed", "reset"])
@pytest.mark.parametrize(
    ("stream", "pieces"),
    [
        (False, lambda wire: [b""]),
        (True, lambda wire: [b""]),
        (False, lambda wire: [json_response(wire.answer)[:-5]]),
        (True, lambda wire: [wire.stream_head]),
        (True, lambda wire: [wire.stream_head, chunked(wire.opener + wire.token)]),
        (True, lambda wire: [wire.stream_head, chunked(wire.opener + wire.token), chunked(wire.token[:20])]),
    ],
)
async def test_a_broken_connection_is_a_cut(
    provider_for: ProviderFor,
    wire: Wire,
    stream: bool,
    pieces: Callable[[Wire], list[bytes]],
    end: Callable[[asyncio.StreamWriter], None],
) -> None:
    async with ScriptedServer(answering(*pieces(wire), end=end)) as server:
        assert (await failure(provider_for(server.base_url), call(stream=stream))).fault is Fault.CUT


@pytest.mark.parametrize("rest", [lambda _: b"", lambda wire: wire.token[:20], lambda wire: wire.usage])
async def test_a_clean_end_without_done_is_a_cut(
    provider_for: ProviderFor, wire: Wire, rest: Callable[[Wire], bytes]
) -> None:
    pieces = [chunked(piece) for piece in (wire.opener + wire.token, rest(wire)) if piece]
    async with ScriptedServer(answering(wire.stream_head, *pieces, STREAM_END)) as server:
        assert (await failure(provider_for(server.base_url), call(stream=True))).fault is Fault.CUT


FINISH = b'{"id":"c","choices":[{"index":%d,"delta":{},"finish_reason":"stop"}]}'
USAGE = b'{"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'


@pytest.mark.parametrize("kind", VERBATIM)
@pytest.mark.parametrize(
    ("last", "asked", "is_complete"),
    [
        ([FINISH % 0], False, True),
        ([FINISH % 0, USAGE], True, True),
        ([FINISH % 0], True, False),
        ([FINISH % 0, FINISH % 1], False, True),
        ([USAGE], False, False),
    ],
)
async def test_an_answer_that_is_complete_but_for_done_gets_it(
    provider_for: ProviderFor, wire: Wire, last: list[bytes], asked: bool, is_complete: bool
) -> None:
    events = [wire.token, *(data_line + b"\n\n" for data_line in (b"data: " + event for event in last))]
    for end in (b"\n\n", b"\n", b""):  # the last blank line may be missing, too
        stream = [*events[:-1], events[-1].rstrip(b"\n") + end]
        body = wire.stream_head + b"".join(chunked(event) for event in stream) + STREAM_END
        async with ScriptedServer(answering(body)) as server:
            called = msgspec.structs.replace(call(stream=True), include_usage=asked)
            if is_complete:
                received = b"".join(await answer(provider_for(server.base_url), called))
                assert received.endswith(b"data: [DONE]\n\n") and received.count(b"data: [DONE]") == 1
                assert FINISH % 0 in received
            else:
                assert (await failure(provider_for(server.base_url), called)).fault is Fault.CUT
            strict = provider_for(server.base_url, strict_done=True)
            assert (await failure(strict, called)).fault is Fault.CUT


@pytest.mark.parametrize("kind", VERBATIM)
async def test_each_choice_must_have_finished(provider_for: ProviderFor, wire: Wire) -> None:
    first, second = (chunked(b"data: " + FINISH % index + b"\n\n") for index in (0, 1))
    two_choices = call(b'{"n": 2}', stream=True)
    async with ScriptedServer(answering(wire.stream_head, first, second, STREAM_END)) as server:
        assert (await answer(provider_for(server.base_url), two_choices))[-1].endswith(b"data: [DONE]\n\n")
    async with ScriptedServer(answering(wire.stream_head, second, STREAM_END)) as server:
        assert (await failure(provider_for(server.base_url), two_choices)).fault is Fault.CUT


@pytest.mark.parametrize("kind", VERBATIM)
async def test_an_answer_without_done_whose_body_is_cut_is_not_complete(provider_for: ProviderFor, wire: Wire) -> None:
    body = wire.stream_head + chunked(wire.token + b"data: " + FINISH % 0 + b"\n\n")
    async with ScriptedServer(answering(body, end=reset)) as server:
        assert (await failure(provider_for(server.base_url), call(stream=True))).fault is Fault.CUT


@pytest.mark.parametrize(
    ("stream", "sent"),
    [
        (False, lambda _: STREAM_HEAD + STREAM_END),
        (False, lambda wire: json_response(wire.answer).replace(b"application/json", b"text/html")),
        (False, lambda wire: json_response(wire.answer).replace(b"content-type", b"x")),
        (False, lambda wire: json_response(wire.answer, "200 OK", "content-encoding: gzip")),
        (False, lambda _: json_response(b"[]")),
        (False, lambda _: json_response(b"")),
        (False, lambda wire: json_response(wire.answer[:-1])),
        (False, lambda wire: json_response(wire.answer[:-1] + b'"}')),
        (False, lambda wire: json_response(wire.answer[:-1] + b',"deep":%b}' % DEEP)),
        (False, lambda _: json_response(b"", "302 Found", "location: http://elsewhere/")),
        (False, lambda _: b"220 smtp.example.com ESMTP\r\n"),
        (True, lambda wire: json_response(wire.answer)),
        (True, lambda wire: wire.stream_head + b"no chunk size\r\n"),
        (True, lambda wire: wire.stream_head + chunked(wire.event(b'{"id": ') + wire.done) + STREAM_END),
        (
            True,
            lambda wire: (
                wire.stream_head + chunked(wire.event(b'{"type":"x","deep":%b}' % DEEP) + wire.done) + STREAM_END
            ),
        ),
    ],
)
async def test_a_malformed_response_is_rejected(
    provider_for: ProviderFor, wire: Wire, stream: bool, sent: Callable[[Wire], bytes]
) -> None:
    async with ScriptedServer(answering(sent(wire))) as server:
        assert (await failure(provider_for(server.base_url), call(stream=stream))).fault is Fault.MALFORMED


async def test_the_size_of_an_event_is_bounded(provider_for: ProviderFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.providers.responses.MAX_FRAME_BYTES", 1000)
    async with ScriptedServer(answering(STREAM_HEAD, *[chunked(b"x" * 600)] * 2)) as server:
        assert (await failure(provider_for(server.base_url), call(stream=True))).fault is Fault.MALFORMED
        await server.until_the_client_closed()


async def test_the_size_of_a_json_response_is_bounded(
    provider_for: ProviderFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.providers.responses.MAX_JSON_BYTES", 1000)
    async with ScriptedServer(answering(json_response(b"{" + b" " * 1000 + b"}"))) as server:
        assert (await failure(provider_for(server.base_url), call())).fault is Fault.MALFORMED


@pytest.mark.parametrize("stream", [False, True])
async def test_cancellation_while_waiting_for_the_head_closes_the_connection(
    provider_for: ProviderFor, stream: bool
) -> None:
    async with ScriptedServer(answering()) as server, asyncio.timeout(TIMEOUT_SECONDS):
        task = asyncio.ensure_future(provider_for(server.base_url).open(call(stream=stream), headers={}))
        await server.until_a_request_arrived()
        task.cancel()
        await server.until_the_client_closed()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("stream", [False, True])
async def test_cancellation_while_waiting_for_a_chunk_closes_the_connection(
    provider_for: ProviderFor, wire: Wire, stream: bool
) -> None:
    sent = wire.stream_head if stream else json_response(wire.answer)[:-5]
    async with ScriptedServer(answering(sent)) as server, asyncio.timeout(TIMEOUT_SECONDS):
        reply = await provider_for(server.base_url).open(call(stream=stream), headers={})
        task = asyncio.ensure_future(anext(aiter(reply)))
        await asyncio.sleep(0)
        task.cancel()
        await server.until_the_client_closed()
        with pytest.raises(asyncio.CancelledError):
            await task
        await reply.aclose()


async def test_closing_a_stream_before_its_end_closes_the_connection(provider_for: ProviderFor, wire: Wire) -> None:
    start = wire.stream_head + chunked(wire.opener + wire.token)
    async with ScriptedServer(answering(start)) as server, asyncio.timeout(TIMEOUT_SECONDS):
        reply = await provider_for(server.base_url).open(call(stream=True), headers={})
        assert timeless(await anext(aiter(reply))) == wire.chat_opener + wire.chat_token
        assert not server.client_closed
        await reply.aclose()
        await server.until_the_client_closed()
