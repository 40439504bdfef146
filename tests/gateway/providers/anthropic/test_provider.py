"""The Anthropic provider: its requests, its error statuses and its token counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.policy import Deployment
from gateway.providers import make_provider
from gateway.providers.base import Fault, Provider, ProviderFailure
from gateway.providers.transport import HTTPTransport
from tests.gateway.calls import a_call, chat
from tests.gateway.providers.anthropic.sdk import read_request
from tests.gateway.providers.scripted_server import TIMEOUT_SECONDS, ReceivedRequest, ScriptedServer, json_response
from tests.gateway.providers.wires import ANTHROPIC, messages_error

SECRET = "sk-ant-secret"


@pytest.fixture
async def provider_at() -> AsyncIterator[Callable[[ScriptedServer], Provider]]:
    async with HTTPTransport() as transport:

        def make(server: ScriptedServer) -> Provider:
            deployment = Deployment.model_validate(
                {
                    "name": "d",
                    "provider": "anthropic",
                    "base_url": server.base_url,
                    "model": "claude",
                    "api_key": {"env": "K"},
                }
            )
            return make_provider(deployment, transport, lambda _: SECRET)

        yield make


ProviderAt = Callable[[ScriptedServer], Provider]


def answering(body: bytes, status: str = "200 OK", *headers: str) -> ScriptedServer:
    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(body, status, *headers))

    return ScriptedServer(script)


async def failure(provider: Provider, **fields: Any) -> ProviderFailure:
    with pytest.raises(ProviderFailure) as raised:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await provider.open(a_call(chat(**fields)), headers={})
    return raised.value


async def test_path_and_headers_of_a_request(provider_at: ProviderAt) -> None:
    async with answering(ANTHROPIC.answer) as server:
        response = await provider_at(server).open(a_call(), headers={"x-request-id": "r"})
        await response.aclose()
    (request,) = server.requests
    assert request.head == "POST /v1/messages HTTP/1.1"
    assert request.headers["authorization"] == f"Bearer {SECRET}"
    assert request.headers["anthropic-version"] == "2026-10-21"
    assert request.headers["x-request-id"] == "r"
    read_request(request.body)


@pytest.mark.parametrize("stream", [False, True])
async def test_status_529_becomes_503(provider_at: ProviderAt, stream: bool) -> None:
    body = json.dumps(messages_error("overloaded_error", "Overloaded")).encode()
    async with answering(body, "529 Overloaded", "retry-after: 3") as server:
        failed = await failure(provider_at(server), stream=stream)
    assert (failed.fault, failed.status, failed.retry_after_seconds) == (Fault.STATUS, 503, 3.0)


@pytest.mark.parametrize("status", ["401 Unauthorized", "402 Payment Required", "403 Forbidden"])
async def test_an_error_about_our_key_is_not_passed_on(provider_at: ProviderAt, status: str) -> None:
    body = json.dumps(messages_error("authentication_error", f"invalid key {SECRET}")).encode()
    async with answering(body, status) as server:
        failed = await failure(provider_at(server))
    assert (failed.fault, failed.body) == (Fault.SETUP, b"")
    assert SECRET not in str(failed)


async def test_an_unsupported_call_is_not_sent(provider_at: ProviderAt) -> None:
    async with answering(ANTHROPIC.answer) as server:
        failed = await failure(provider_at(server), messages=[{"role": "user", "content": [{"type": "input_audio"}]}])
    assert (failed.fault, failed.status, server.requests) == (Fault.UNSUPPORTED, 400, [])
    assert json.loads(failed.body)["error"]["param"] == "messages[0].content[0].type"
    assert "input_audio" not in failed.log_message


@pytest.mark.parametrize(
    ("body", "status", "tokens"),
    [(b'{"input_tokens": 12}', "200 OK", 12), (b"{}", "200 OK", None), (b"", "404 No", None)],
)
async def test_a_prompt_is_counted_by_the_server_s_tokenizer(
    provider_at: ProviderAt, body: bytes, status: str, tokens: int | None
) -> None:
    async with answering(body, status) as server:
        call = a_call(chat(max_tokens=5, stream=True, temperature=0.5, reasoning_effort="low"))
        assert await provider_at(server).count_prompt_tokens(call) == tokens
    (request,) = server.requests
    assert request.head == "POST /v1/messages/count_tokens HTTP/1.1"
    assert json.loads(request.body).keys() == {"model", "messages", "thinking", "output_config"}


async def test_an_unsupported_prompt_is_not_counted(provider_at: ProviderAt) -> None:
    async with answering(b'{"input_tokens": 12}') as server:
        assert await provider_at(server).count_prompt_tokens(a_call(chat(seed=1))) is None
    assert server.requests == []
