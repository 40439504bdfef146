"""Calls of providers for the contract tests: what they send, and how a response is read to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from gateway.policy import Policy, Secret
from gateway.providers import PROVIDERS, Provider, ProviderFailure, UpstreamResponse
from gateway.providers.text_events import TextSink
from gateway.types import Call, Operation, Principal, Trace
from tests.gateway.providers.scripted_server import TIMEOUT_SECONDS, ReceivedRequest, Script
from tests.gateway.providers.wires import timeless, wire_of

DEEP = b"[" * 10_000 + b"]" * 10_000  # nested too deeply for the JSON decoder
VERBATIM = sorted(kind for kind in PROVIDERS if wire_of(kind).verbatim)  # their bytes pass untouched
ProviderFor = Callable[..., Provider]


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
            ended = await self._response.stream_to(take_one, TextSink(lambda chunk, events: take_one(chunk)))
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


def resolve_nothing(secret: Secret) -> str:
    raise AssertionError(f"no provider needs {secret.env}")
