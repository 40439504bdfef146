"""The contract of the provider port, run over every provider: error statuses, and errors within a response."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.providers import Fault, ProviderFailure
from tests.contract.provider_calls import DEEP, VERBATIM, ProviderFor, answer, answering, call, failure
from tests.gateway.providers.scripted_server import STREAM_END, ScriptedServer, chunked, json_response
from tests.gateway.providers.wires import TEXT, Wire, data, timeless
from tests.ports import refusing_port


@pytest.mark.parametrize("stream", [False, True])
async def test_connection_refused(provider_for: ProviderFor, stream: bool) -> None:
    with refusing_port() as port:
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
