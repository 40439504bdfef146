"""The contract of the provider port, run over every provider: requests, streams, health checks and connections.

`test_provider_errors.py` and `test_provider_cuts.py` are the rest of it. All use real sockets and a scripted server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest

from gateway.policy import Deployment
from gateway.providers import Fault, ProviderFailure, UnknownProvider, UpstreamResponse, make_provider
from gateway.providers.sse import event_data
from gateway.providers.transport import HTTPTransport
from gateway.types import Operation
from tests.contract.provider_calls import VERBATIM, ProviderFor, answer, answering, call, failure, resolve_nothing
from tests.gateway.providers.scripted_server import (
    STREAM_END,
    STREAM_HEAD,
    TIMEOUT_SECONDS,
    ReceivedRequest,
    ScriptedServer,
    chunked,
    json_response,
)
from tests.gateway.providers.wires import TEXT, Wire, data, timeless, wire_of

HEALTH_PATHS = {
    "openai": "/v1/models",
    "anthropic": "/v1/models",
    "gemini": "/v1/models",
    "azure": "/v1/openai/models?api-version=2024-10-21",
    "ollama": "/v1/tags",
}
Open = Callable[..., "asyncio.Future[UpstreamResponse]"]


async def test_a_json_response_is_one_chunk(provider_for: ProviderFor, wire: Wire) -> None:
    async with ScriptedServer(answering(json_response(wire.answer))) as server:
        assert await answer(provider_for(server.base_url), call(b'{"model": "ours", "messages": []}')) == [
            wire.chat_answer
        ]
    received = server.requests[0]
    assert received.head == f"POST /v1/{wire.path_of(Operation.CHAT)} HTTP/1.1"
    assert received.headers[wire.key[0]] == wire.key[1]
    assert received.headers["host"] == f"127.0.0.1:{server.port}"
    assert received.headers["accept-encoding"] == "identity"
    assert received.headers["content-type"] == "application/json"
    assert received.headers["x-request-id"] == "call-1"


async def test_the_call_id_is_sent_to_deployments_with_kv_events(
    kind: str, wire: Wire, transport: HTTPTransport
) -> None:
    """As the session id, which their KV events then contain. Elsewhere, a session may mean something else."""
    async with ScriptedServer(answering(json_response(wire.answer))) as server:
        for kv_events in (None, "tcp://10.0.0.5:5557"):
            deployment = Deployment(name="d", provider=kind, base_url=server.base_url, model="m", kv_events=kv_events)
            await answer(make_provider(deployment, transport, resolve_nothing), call())
        assert [request.headers.get("x-session-id") for request in server.requests] == [None, call().id]


async def test_the_deadline_is_sent_to_engines_that_support_it(kind: str, wire: Wire, transport: HTTPTransport) -> None:
    async with ScriptedServer(answering(json_response(wire.answer))) as server:
        deployment = Deployment(name="d", provider=kind, base_url=server.base_url, model="m")
        limited = msgspec.structs.replace(call(), deadline=asyncio.get_running_loop().time() + 60)
        await answer(make_provider(deployment, transport, resolve_nothing), limited)
        deadline_ms = server.requests[0].headers.get("x-request-deadline-ms")
        assert deadline_ms is None if kind != "warmpath" else 59_000 < int(deadline_ms or 0) <= 60_000


@pytest.mark.parametrize("operation", Operation)
async def test_each_operation_has_its_path(provider_for: ProviderFor, wire: Wire, operation: Operation) -> None:
    """An operation that the dialect lacks is rejected by name before anything is sent, so the router can skip it."""
    reply = (wire.embeddings if operation is Operation.EMBEDDING else None) or wire.answer
    async with ScriptedServer(answering(json_response(reply))) as server:
        provider, request = provider_for(server.base_url), call(operation=operation)
        refusal = provider.unsupported_error(request)
        if operation in wire.operations:
            assert refusal is None
            await answer(provider, request)
            assert server.requests[0].head == f"POST /v1/{wire.path_of(operation)} HTTP/1.1"
        else:
            assert refusal is not None
            failed = await failure(provider, request)
            assert (failed.fault, failed.status, failed.body) == (Fault.UNSUPPORTED, 400, refusal.body)
            assert operation.value in msgspec.json.decode(failed.body)["error"]["message"]
            assert server.requests == []


@pytest.mark.parametrize("kind", VERBATIM)
def test_the_body_is_the_client_s_except_for_the_model(provider_for: ProviderFor) -> None:
    body = b'{"messages": [ {"a":1.00} ], "model":"ours", "unknown\\u00e9": 1e400, "stream_options": null}'
    sent = msgspec.json.decode(provider_for("http://x/v1").render(call(body)), type=dict[str, msgspec.Raw])
    assert bytes(sent["messages"]) == b'[ {"a":1.00} ]'
    assert bytes(sent["model"]) == b'"theirs/model"'
    assert bytes(sent["unknowné"]) == b"1e400"
    assert bytes(sent["stream_options"]) == b"null"


@pytest.mark.parametrize("kind", VERBATIM)
def test_usage_is_always_requested_in_a_stream(provider_for: ProviderFor) -> None:
    provider = provider_for("http://x/v1")
    for given in (b"{}", b'{"stream_options": null}', b'{"stream_options": {"include_usage": false, "more": 1.0}}'):
        options = msgspec.json.decode(provider.render(call(given, stream=True)))["stream_options"]
        assert options["include_usage"] is True
        assert options.get("more", 1.0) == 1.0


@pytest.mark.parametrize("kind", VERBATIM)
def test_stream_options_of_a_wrong_type_are_passed_on_unchanged(provider_for: ProviderFor) -> None:
    sent = msgspec.json.decode(provider_for("http://x/v1").render(call(b'{"stream_options": [1]}', stream=True)))
    assert sent["stream_options"] == [1]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_a_stream_is_passed_on_in_whole_frames(
    provider_for: ProviderFor, wire: Wire, size: int, line_end: bytes
) -> None:
    """Byte for byte, unless it is translated or its lines do not end with LF."""
    tokens = [wire.token, wire.token, wire.token if wire.lines else b"id: x\n" + wire.token]
    usual = b"".join([b"\n" if wire.lines else b": hello\n\n", wire.opener, *tokens, wire.usage, wire.done])
    stream = usual if wire.lines and line_end == b"\r" else usual.replace(b"\n", line_end)
    given = (
        usual
        if wire.verbatim
        else b"".join([wire.chat_opener, *3 * [wire.chat_token], wire.chat_usage, wire.chat_done])
    )
    pieces = [chunked(stream[i : i + size]) for i in range(0, len(stream), size)]
    async with ScriptedServer(answering(wire.stream_head, *pieces, STREAM_END)) as server:
        provider = provider_for(server.base_url)
        chunks = await answer(provider, call(stream=True))
        assert b"".join(chunks) == given
        assert all(chunk.endswith(b"\n\n") for chunk in chunks)
        await answer(provider, call(stream=True))
        assert server.connections == 1  # the first call waited for the end of the HTTP message


async def test_a_chunk_is_passed_on_as_soon_as_it_is_complete(provider_for: ProviderFor, wire: Wire) -> None:
    more = asyncio.Event()

    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.stream_head + chunked(wire.opener + wire.token + wire.usage[:10]))
        await more.wait()
        writer.write(chunked(wire.usage[10:]) + chunked(wire.done) + STREAM_END)

    async with ScriptedServer(script) as server, asyncio.timeout(TIMEOUT_SECONDS):
        reply = await provider_for(server.base_url).open(call(stream=True), headers={})
        assert timeless(await anext(aiter(reply))) == wire.chat_opener + wire.chat_token
        more.set()
        assert timeless(b"".join([chunk async for chunk in reply])) == wire.chat_usage + wire.chat_done


async def test_stream_to_wakes_no_task_for_a_chunk(kind: str, wire: Wire, transport: HTTPTransport) -> None:
    """The caller sleeps while the stream passes. Only what had arrived before may be passed on by its own task."""
    chunks: list[bytes] = []
    in_callbacks: list[bytes] = []

    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.stream_head)
        for count in range(1, 6):
            writer.write(chunked(wire.opener + wire.token if count == 1 else wire.token))
            while len(chunks) < count:
                await asyncio.sleep(0)
        writer.write(chunked(wire.done) + STREAM_END)

    def take(chunk: bytes) -> bool:
        chunks.append(timeless(chunk))
        if asyncio.current_task() is None:
            in_callbacks.append(timeless(chunk))
        return True

    async with ScriptedServer(script) as server, asyncio.timeout(TIMEOUT_SECONDS):
        deployment = Deployment(name="d", provider=kind, base_url=server.base_url, model="m")
        reply = await make_provider(deployment, transport, resolve_nothing).open(call(stream=True), headers={})
        assert await reply.stream_to(take)
        assert await reply.stream_to(take), "it stays at the end"
        await reply.aclose()
    assert chunks == [wire.chat_opener + wire.chat_token, *[wire.chat_token] * 4, wire.chat_done]
    assert in_callbacks == chunks[1 : -1 if wire.ends_with_body else None]


async def test_an_exception_of_the_sink_ends_stream_to(kind: str, wire: Wire, transport: HTTPTransport) -> None:
    class Full(Exception):
        pass

    def fail(chunk: bytes) -> bool:
        raise Full

    pieces = [chunked(wire.opener + wire.token), chunked(wire.done)]
    async with ScriptedServer(answering(wire.stream_head, *pieces)) as server:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            deployment = Deployment(name="d", provider=kind, base_url=server.base_url, model="m")
            reply = await make_provider(deployment, transport, resolve_nothing).open(call(stream=True), headers={})
            with pytest.raises(Full):
                await reply.stream_to(fail)
            await reply.aclose()
            await server.until_the_client_closed()


async def test_the_last_blank_line_may_be_missing(provider_for: ProviderFor, wire: Wire) -> None:
    stream = wire.opener + wire.token + wire.done.rstrip(b"\n")
    async with ScriptedServer(answering(wire.stream_head, chunked(stream), STREAM_END)) as server:
        assert await answer(provider_for(server.base_url), call(stream=True)) == [
            wire.chat_opener + wire.chat_token,
            wire.chat_done,
        ]


async def test_an_event_may_have_several_data_lines(provider_for: ProviderFor, wire: Wire) -> None:
    if wire.lines:
        return
    split = (
        wire.token.replace(b", ", b",\ndata: ") if b", " in wire.token else wire.token.replace(b",", b",\ndata: ", 1)
    )
    assert split.count(b"data:") > 1
    stream = (wire.opener + split + wire.done).replace(b"\n", b"\r\n")
    async with ScriptedServer(answering(wire.stream_head, chunked(stream), STREAM_END)) as server:
        sent = b"".join(await answer(provider_for(server.base_url), call(stream=True)))
        expected = wire.chat_opener + wire.chat_token + wire.chat_done
        assert [json.loads(data) for data in event_data(sent)[:-1]] == [
            json.loads(data) for data in event_data(expected)[:-1]
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_not_utf8_is_malformed(provider_for: ProviderFor, wire: Wire, stream: bool) -> None:
    bad = b'{"id": "\xff", "choices": [], "type": "ping"}'
    reply = wire.stream_head + chunked(wire.event(bad)) if stream else json_response(bad)
    async with ScriptedServer(answering(reply)) as server:
        with pytest.raises(ProviderFailure) as failed:
            await answer(provider_for(server.base_url), call(stream=stream))
    assert failed.value.fault is Fault.MALFORMED


SECRET = "sk-secret-0123456789-abcdefghijkl"


@pytest.mark.parametrize(
    "reply",
    [
        json_response(b'{"error": {"message": "bad header: Bearer %b"}}' % SECRET.encode(), "400 Bad Request"),
        json_response(b'{"error": {"message": "you sent sk-secret-0123********"}}', "422 Unprocessable Entity"),
        json_response(b"<html>%b</html>" % SECRET.encode(), "500 Oops", f"content-type: {SECRET}"),
        json_response(b'{"error": {"message": "%b", "code": 400}}' % SECRET.encode()),
        STREAM_HEAD + chunked(b'data: {"error": {"message": "%b"}}\n\n' % SECRET.encode()),
        STREAM_HEAD.replace(b"text/event-stream", SECRET.encode()),
    ],
)
async def test_a_quoted_key_is_redacted(kind: str, transport: HTTPTransport, reply: bytes) -> None:
    wire = wire_of(kind)
    if wire.lines:
        reply = reply.replace(STREAM_HEAD, wire.stream_head).replace(b"data: ", b"      ")
    async with ScriptedServer(answering(reply)) as server:
        fields = {"name": "d", "provider": kind, "base_url": server.base_url, "model": "m", "api_key": {"env": "KEY"}}
        provider = make_provider(Deployment.model_validate(fields), transport, lambda _: SECRET)
        with pytest.raises(ProviderFailure) as failed:
            await answer(provider, call(stream=reply.startswith(wire_of(kind).stream_head[:40])))
    failure = failed.value
    told = f"{failure} {failure.log_message} {failure.upstream_message} {failure.body!r}"
    assert "sk-secret-0123" not in told


async def test_a_caller_that_stops_at_done_keeps_the_connection(provider_for: ProviderFor, wire: Wire) -> None:
    if wire.ends_with_body:
        return
    closed = asyncio.Event()

    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.stream_head + chunked(wire.opener + wire.token + wire.done))
        await closed.wait()
        writer.write(STREAM_END)

    async with ScriptedServer(script) as server, asyncio.timeout(TIMEOUT_SECONDS):
        provider = provider_for(server.base_url)
        for _ in range(2):
            reply = await provider.open(call(stream=True), headers={})
            assert timeless(await anext(aiter(reply))) == wire.chat_opener + wire.chat_token + wire.chat_done
            closing = asyncio.ensure_future(reply.aclose())
            await asyncio.sleep(0)
            closed.set()
            await closing
        assert server.connections == 1


async def test_closing_waits_only_briefly_for_the_end_of_the_http_message(
    provider_for: ProviderFor, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wire.ends_with_body:
        return
    monkeypatch.setattr("gateway.providers.responses.DRAIN_TIMEOUT_SECONDS", 0.01)
    async with ScriptedServer(
        answering(wire.stream_head, chunked(wire.opener + wire.token), chunked(wire.done))
    ) as server:
        given = b"".join(await answer(provider_for(server.base_url), call(stream=True)))
        assert given == wire.chat_opener + wire.chat_token + wire.chat_done
        await server.until_the_client_closed()


@pytest.mark.parametrize("status", ["400 No", "503 No", "401 No"])
async def test_a_failure_gives_its_connection_slot_back(kind: str, provider_for: ProviderFor, status: str) -> None:
    del provider_for
    async with (
        ScriptedServer(answering(json_response(b"{}", status))) as server,
        HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=0.0) as transport,
    ):
        deployment = Deployment(name="d", provider=kind, base_url=server.base_url, model="m")
        provider = make_provider(deployment, transport, resolve_nothing)
        for _ in range(3):
            assert (await failure(provider, call())).fault is not Fault.POOL


async def test_an_exhausted_connection_pool_is_a_pool_fault(kind: str) -> None:
    async with (
        ScriptedServer(answering(wire_of(kind).stream_head)) as server,
        HTTPTransport(max_connections_per_origin=1, pool_timeout_seconds=0.01) as transport,
    ):
        deployment = Deployment(name="d", provider=kind, base_url=server.base_url, model="m")
        provider = make_provider(deployment, transport, resolve_nothing)
        held = await provider.open(call(stream=True), headers={})
        assert (await failure(provider, call(stream=True))).fault is Fault.POOL
        await held.aclose()


async def test_a_connection_that_the_server_closed_while_idle_is_no_failure(
    provider_for: ProviderFor, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.providers.transport.client.STALE_SECONDS", 10.0)  # even on a slow machine
    async with ScriptedServer(answering(json_response(wire.answer), end=asyncio.StreamWriter.close)) as server:
        provider = provider_for(server.base_url)
        for _ in range(3):
            assert await answer(provider, call()) == [wire.chat_answer]


async def test_large_bodies_both_ways(provider_for: ProviderFor, wire: Wire) -> None:
    text = "é" * 1_000_000
    text_json, long_json = data(TEXT)[6:-2], data(text)[6:-2]

    async def script(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(
            wire.stream_head + chunked(wire.opener + wire.token.replace(text_json, long_json) + wire.done) + STREAM_END
        )

    async with ScriptedServer(script) as server:
        provider = provider_for(server.base_url)
        request = call(msgspec.json.encode({"messages": [{"role": "user", "content": text}]}), stream=True)
        given = b"".join(await answer(provider, request))
        assert given == wire.chat_opener + wire.chat_token.replace(text_json, long_json) + wire.chat_done
        assert server.requests[0].body == provider.render(request)
        assert text.encode() in server.requests[0].body


@pytest.mark.parametrize(("status", "healthy"), [("200 OK", True), ("503 No", False), ("401 No", False)])
async def test_a_health_check_reports_success_statuses_only(
    kind: str, provider_for: ProviderFor, status: str, healthy: bool
) -> None:
    async with ScriptedServer(answering(json_response(b"{}", status))) as server:
        provider = provider_for(server.base_url)
        assert await provider.healthy() is healthy
        assert await provider.healthy() is healthy
        path = HEALTH_PATHS.get(kind, "/health")
        assert server.requests[0].head == f"GET {path} HTTP/1.1"
        assert server.connections == 1


async def test_a_health_check_times_out(provider_for: ProviderFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.providers.openai.HEALTH_TIMEOUT_SECONDS", 0.01)
    async with ScriptedServer(answering()) as server:
        assert await provider_for(server.base_url).healthy() is False


def test_the_error_for_an_unknown_provider_lists_the_valid_ones(transport: HTTPTransport) -> None:
    deployment = Deployment(name="d", provider="olama", base_url="http://x/v1", model="m")
    with pytest.raises(UnknownProvider, match=r"'d'.*'olama'.*openai, sglang, trtllm, vllm, warmpath"):
        make_provider(deployment, transport, resolve_nothing)
