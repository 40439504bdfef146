"""The contract of the provider port, run over every provider against real sockets and misbehaving servers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import msgspec
import pytest

from gateway.policy import Deployment, Policy, Secret
from gateway.providers import (
    PROVIDERS,
    Fault,
    Provider,
    ProviderFailure,
    UnknownProvider,
    UpstreamResponse,
    make_provider,
)
from gateway.providers.sse import event_data
from gateway.providers.transport import HTTPTransport
from gateway.types import Call, Operation, Principal, Trace
from tests.gateway.providers.scripted_server import (
    STREAM_END,
    STREAM_HEAD,
    TIMEOUT_SECONDS,
    ReceivedRequest,
    Script,
    ScriptedServer,
    chunked,
    json_response,
    reset,
)
from tests.gateway.providers.wires import TEXT, Wire, data, timeless, wire_of

DEEP = b"[" * 10_000 + b"]" * 10_000  # nested too deeply for the JSON decoder
HEALTH_PATHS = {
    "openai": "/v1/models",
    "anthropic": "/v1/models",
    "gemini": "/v1/models",
    "azure": "/v1/openai/models?api-version=2024-10-21",
    "ollama": "/v1/tags",
}
VERBATIM = sorted(kind for kind in PROVIDERS if wire_of(kind).verbatim)  # their bytes pass untouched

Open = Callable[..., "asyncio.Future[UpstreamResponse]"]


def call(fields: bytes = b"{}", *, operation: Operation = Operation.CHAT, stream: bool = False) -> Call:
    policy = Policy.model_validate(
        {
            "deployments": [{"name": "d", "base_url": "http://unused", "model": "theirs"}],
            "models": [{"name": "ours", "deployments": ["d"]}],
            "tenants": [{"name": "t"}],
        }
    )
    return Call(
        id="call-1",
        operation=operation,
        principal=Principal(policy.tenants[0], "k"),
        policy=policy,
        asked_model="ours",
        model=policy.models[0],
        class_name="batch",
        latency_class=policy.classes["batch"],
        stream=stream,
        include_usage=False,
        max_output_tokens=None,
        deterministic=False,
        fields=msgspec.json.decode(fields, type=dict[str, msgspec.Raw]),
        fingerprint=(),
        prompt_tokens_estimate=0,
        cache_salt="salt-of-the-tenant",
        service_tier=None,
        end_user=None,
        canonical_steps=(),
        class_rule=None,
        deadline=0.0,
        trace=Trace(trace_id=1, parent_span_id=0, sampled=False),
    )


@pytest.fixture(params=sorted(PROVIDERS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def wire(kind: str) -> Wire:
    return wire_of(kind)


@pytest.fixture
async def transport() -> AsyncIterator[HTTPTransport]:
    async with HTTPTransport() as transport:
        yield transport


class StreamedResponse(UpstreamResponse):
    """A response read through `stream_to`, one chunk at a time."""

    def __init__(self, response: UpstreamResponse) -> None:
        self._response = response
        self._failure: ProviderFailure | None = None

    async def __anext__(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        taken: list[bytes] = []

        def take_one(chunk: bytes) -> bool:
            taken.append(chunk)
            return False

        try:
            ended = await self._response.stream_to(take_one, lambda chunk, events: take_one(chunk))
        except ProviderFailure as failure:
            if not taken:
                raise
            self._failure = failure  # raised after the chunk before it
        else:
            assert ended or taken
        if not taken:
            raise StopAsyncIteration
        return taken.pop()

    async def aclose(self) -> None:
        await self._response.aclose()


class StreamingProvider:
    """A provider whose responses are read through `stream_to`."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        return StreamedResponse(await self._provider.open(call, headers=headers))


@pytest.fixture(params=["anext", "stream_to"])
def reading(request: pytest.FixtureRequest) -> str:
    way: str = request.param
    return way


@pytest.fixture
def provider_for(kind: str, reading: str, transport: HTTPTransport) -> Callable[..., Provider]:
    def make(base_url: str, **settings: Any) -> Provider:
        key = {"env": "KEY_OF_D"}
        deployment = Deployment.model_validate(
            {"name": "d", "provider": kind, "base_url": base_url, "model": "theirs/model", "api_key": key, **settings}
        )
        provider = make_provider(deployment, transport, lambda secret: f"secret-in-{secret.env}")
        return cast(Provider, StreamingProvider(provider)) if reading == "stream_to" else provider

    return make


def answering(*pieces: bytes, end: Callable[[asyncio.StreamWriter], Any] | None = None) -> Script:
    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # so that the pieces are usually sent in separate packets
        if end is not None:
            end(writer)

    return script


async def answer(provider: Provider, call: Call) -> list[bytes]:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        reply = await provider.open(call, headers={"x-request-id": call.id})
        try:
            return [timeless(chunk) async for chunk in reply]
        finally:
            await reply.aclose()
            await reply.aclose()  # idempotent


async def failure(provider: Provider, call: Call) -> ProviderFailure:
    with pytest.raises(ProviderFailure) as raised:
        await answer(provider, call)
    return raised.value


ProviderFor = Callable[..., Provider]


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


@pytest.mark.parametrize("stream", [False, True])
async def test_connection_refused(provider_for: ProviderFor, stream: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    provider = provider_for(f"http://127.0.0.1:{port}/v1")
    assert (await failure(provider, call(stream=stream))).fault is Fault.CONNECT
    assert await provider.healthy() is False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [408, 409, 429, 498, 500, 503])
async def test_a_status_that_is_worth_a_retry(provider_for: ProviderFor, status: int, stream: bool) -> None:
    script = answering(json_response(b'{"error": {}}', f"{status} No", "retry-after: 7"))
    async with ScriptedServer(script) as server:
        failed = await failure(provider_for(server.base_url), call(stream=stream))
    assert (failed.fault, failed.status, failed.retry_after_seconds) == (Fault.STATUS, status, 7.0)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (["retry-after: 1.5"], 1.5),
        (["retry-after-ms: 250", "retry-after: 9"], 0.25),
        (["retry-after: Wed, 21 Oct 2015 07:28:00 GMT"], 0.0),
        (["retry-after: soon"], None),
        (["retry-after: nan"], None),
        ([], None),
    ],
)
async def test_retry_after(provider_for: ProviderFor, headers: list[str], seconds: float | None) -> None:
    async with ScriptedServer(answering(json_response(b"{}", "429 Too Many Requests", *headers))) as server:
        assert (await failure(provider_for(server.base_url), call())).retry_after_seconds == seconds


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_error_body_of_a_rejected_request_is_kept_for_the_client(
    provider_for: ProviderFor, wire: Wire, status: int, stream: bool
) -> None:
    async with ScriptedServer(answering(json_response(wire.refusal, f"{status} No"))) as server:
        failed = await failure(provider_for(server.base_url), call(stream=stream))
    assert (failed.fault, failed.status, failed.body) == (Fault.REFUSED, status, wire.chat_refusal)
    assert failed.content_type == "application/json"


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (400, {"message": "This model's maximum context length is 4096 tokens.", "code": None}, "context"),
        (400, {"message": "x", "code": "context_length_exceeded"}, "context"),
        (
            400,
            {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"},
            "context",
        ),
        (400, {"message": "prompt is too long: 210000 tokens > 200000 maximum"}, "context"),
        (400, {"message": "The input token count (9) exceeds the maximum number of tokens allowed"}, "context"),
        (400, {"message": "x", "code": "content_filter"}, "refused_content"),
        (400, {"message": "x", "code": "content_policy_violation"}, "refused_content"),
        (403, {"message": "Your chosen model requires moderation and your input was flagged"}, "refused_content"),
        (400, {"message": "temperature must be at most 2"}, ""),
        (429, {"message": "too many tokens per minute", "code": "rate_limit_exceeded"}, ""),
    ],
)
async def test_the_reason_of_a_rejection(
    provider_for: ProviderFor, status: int, error: dict[str, Any], reason: str
) -> None:
    body = msgspec.json.encode({"error": error})
    async with ScriptedServer(answering(json_response(body, f"{status} No"))) as server:
        failed = await failure(provider_for(server.base_url), call())
    assert failed.reason == reason and (failed.fault is Fault.REFUSED or status == 429)


async def test_an_unreadable_error_body_is_passed_on(provider_for: ProviderFor) -> None:
    for body in (DEEP, b'{"error":%b}' % DEEP):
        async with ScriptedServer(answering(json_response(body, "400 No"))) as server:
            failed = await failure(provider_for(server.base_url), call())
        assert (failed.fault, failed.status, failed.body) == (Fault.REFUSED, 400, body)


@pytest.mark.parametrize("status", [401, 402, 403, 407])
async def test_an_error_about_our_key_is_not_passed_on(provider_for: ProviderFor, status: int) -> None:
    async with ScriptedServer(answering(json_response(b"Incorrect key: secret-in", f"{status} No"))) as server:
        failed = await failure(provider_for(server.base_url), call())
    assert (failed.fault, failed.body, failed.outcome) == (Fault.SETUP, b"", f"status_{status}")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (b"", Fault.SETUP),
        (b"<html>not found</html>", Fault.SETUP),
        (b'{"detail": "Not Found"}', Fault.SETUP),
        (b'{"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}}', Fault.SETUP),
        (b'{"object": "error", "message": "The model `x` does not exist.", "code": 404}', Fault.SETUP),
        (b'{"error": {"message": "x", "param": "model", "code": "model_not_found"}}', Fault.SETUP),
        (b'{"error": {"message": "No such File object: file-1", "param": "id", "code": null}}', Fault.REFUSED),
        (b'{"error": {"message": "No such prompt", "param": null, "code": "prompt_not_found"}}', Fault.REFUSED),
    ],
)
async def test_a_404_is_about_the_model_or_path_that_the_gateway_wrote(
    provider_for: ProviderFor, error: bytes, fault: Fault
) -> None:
    async with ScriptedServer(answering(json_response(error, "404 Not Found"))) as server:
        failed = await failure(provider_for(server.base_url), call())
    assert (failed.fault, failed.status) == (fault, 404)


@pytest.mark.parametrize(
    ("status", "message", "fault"),
    [
        (501, "", Fault.UNSUPPORTED),
        (500, "image input is not supported - hint: provide the mmproj", Fault.UNSUPPORTED),
        (400, "The model does not support Embeddings API", Fault.UNSUPPORTED),
        (500, "CUDA error", Fault.STATUS),
        (400, "messages must not be empty", Fault.REFUSED),
        (429, "this rate is not supported", Fault.STATUS),
    ],
)
async def test_a_missing_feature_is_told_from_other_errors(
    provider_for: ProviderFor, status: int, message: str, fault: Fault
) -> None:
    body = msgspec.json.encode({"error": {"message": message, "type": "x"}})
    async with ScriptedServer(answering(json_response(body, f"{status} No"))) as server:
        failed = await failure(provider_for(server.base_url), call())
    assert (failed.fault, failed.status) == (fault, status)


async def test_an_error_body_is_bounded(provider_for: ProviderFor) -> None:
    async with ScriptedServer(answering(json_response(b"x" * 1_000_000, "400 No"))) as server:
        assert len((await failure(provider_for(server.base_url), call())).body) == 64 * 1024


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


@pytest.mark.parametrize("started", [False, True])
async def test_an_error_in_the_stream_is_a_cut_once_it_has_started(
    provider_for: ProviderFor, wire: Wire, started: bool
) -> None:
    earlier = wire.opener + wire.token if started else b""
    async with ScriptedServer(
        answering(wire.stream_head + chunked(earlier + wire.error + wire.done) + STREAM_END)
    ) as server:
        reply = await provider_for(server.base_url).open(call(stream=True), headers={})
        chunks = []
        with pytest.raises(ProviderFailure, match="out of memory") as raised:
            async for chunk in reply:
                chunks.append(chunk)
        await reply.aclose()
    assert (raised.value.fault, raised.value.status) == ((Fault.CUT, None) if started else (Fault.STATUS, 500))
    assert "out of memory" not in raised.value.log_message  # it may quote the prompt
    assert timeless(b"".join(chunks)) == (wire.chat_opener + wire.chat_token if started else b"")


@pytest.mark.parametrize(
    ("error", "fault", "status"),
    [
        ({"message": "out of memory", "code": 503}, Fault.STATUS, 503),
        ({"message": "out of memory", "type": "api_error"}, Fault.STATUS, 500),
        ("out of memory", Fault.STATUS, 500),
        ({"message": "out of memory", "code": 429}, Fault.STATUS, 429),
        ({"message": "out of memory", "code": 422}, Fault.REFUSED, 422),
    ],
)
async def test_an_error_in_a_json_response_is_a_failure(
    provider_for: ProviderFor, error: Any, fault: Fault, status: int | None
) -> None:
    """With status 200, which servers send before they start to work."""
    body = msgspec.json.encode({"error": error})
    async with ScriptedServer(answering(json_response(body))) as server:
        failed = await failure(provider_for(server.base_url), call())
    assert (failed.fault, failed.status, failed.upstream_message) == (fault, status, "out of memory")
    assert failed.body == body
    assert "out of memory" not in failed.log_message


async def test_an_error_in_a_json_response_in_its_older_form(provider_for: ProviderFor) -> None:
    body = b'{"object": "error", "message": "too long", "type": "BadRequestError", "param": null, "code": 400}'
    async with ScriptedServer(answering(json_response(body))) as server:
        failed = await failure(provider_for(server.base_url), call())
    assert (failed.fault, failed.status, failed.upstream_message) == (Fault.REFUSED, 400, "too long")
    assert msgspec.json.decode(failed.body)["error"]["type"] == "BadRequestError"


async def test_an_error_in_a_json_response_about_our_key_is_not_passed_on(provider_for: ProviderFor) -> None:
    body = b'{"error": {"message": "Incorrect key: secret-in", "code": 401}}'
    async with ScriptedServer(answering(json_response(body))) as server:
        failed = await failure(provider_for(server.base_url), call())
    assert (failed.fault, failed.status, failed.body, failed.upstream_message) == (Fault.SETUP, 401, b"", "")


@pytest.mark.parametrize("kind", VERBATIM)
@pytest.mark.parametrize("started", [False, True])
async def test_an_error_as_the_first_event_may_reject_the_request(
    provider_for: ProviderFor, wire: Wire, started: bool
) -> None:
    stream = (wire.token if started else b"") + data({"error": {"message": "no such image", "code": 400}})
    async with ScriptedServer(answering(wire.stream_head + chunked(stream) + STREAM_END)) as server:
        failed = await failure(provider_for(server.base_url), call(stream=True))
    assert (failed.fault, failed.status) == ((Fault.CUT, None) if started else (Fault.REFUSED, 400))
    assert failed.upstream_message == "no such image"


async def test_text_that_looks_like_an_error_is_not_one(provider_for: ProviderFor, wire: Wire) -> None:
    text_json, error_json = data(TEXT)[6:-2], data('data: {"error": 1}\n\ndata: [DONE]')[6:-2]
    text = wire.token.replace(text_json, error_json)
    given = wire.chat_opener + wire.chat_token.replace(text_json, error_json) + wire.chat_done
    async with ScriptedServer(
        answering(wire.stream_head + chunked(wire.opener + text + wire.done) + STREAM_END)
    ) as server:
        assert b"".join(await answer(provider_for(server.base_url), call(stream=True))) == given


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


def resolve_nothing(secret: Secret) -> str:
    raise AssertionError(f"no provider needs {secret.env}")
