"""vLLM's contract for prefill and decode engines, over sockets: what each of two servers is sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.deployments.fleet import Fleet
from gateway.policy import Policy
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.queueing import Queue
from gateway.routing import STRATEGIES
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.router import Router
from tests.contract.provider_calls import resolve_nothing
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.providers.scripted_server import (
    STREAM_END,
    STREAM_HEAD,
    ReceivedRequest,
    Script,
    ScriptedServer,
    chunked,
    json_response,
)
from tests.gateway.routing.rig import DONE, TEXT, sink_into

PROMPT = "All the world is a stage, and all the men and women merely players. " * 200
# As vLLM's NixlConnector describes the blocks of a prompt, which the decode engine reads from its peer.
NIXL = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "0b5b9f0e-6d3e", "remote_request_id": "chatcmpl-1", "remote_host": "10.0.0.7",
    "remote_port": 5600, "tp_size": 2,
}  # fmt: skip
REQUESTED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def policy(prefill: str, decode: str, **fields: Any) -> Policy:
    common = {"provider": "vllm", "model": "served"}
    return a_policy(
        deployments=[
            {"name": "p", "base_url": prefill, "role": "prefill", "prefill_tokens_per_second": "1M", **common},
            {"name": "d", "base_url": decode, "role": "decode", **common},
        ],
        models=[{"name": "m", "deployments": ["p", "d"]}],
        **fields,
    )


async def stream(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunked(TEXT) + chunked(DONE) + STREAM_END)


def prefilled(**more: Any) -> Script:
    body = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "served",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3400, "completion_tokens": 1, "total_tokens": 3401, "prompt_tokens_details": None},
        **more,
    }  # fmt: skip

    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(json.dumps(body).encode()))

    return respond


async def ask(given: Policy, **fields: Any) -> AttemptLog:
    """Open one streamed call through the router, and read it to its end."""
    transport = HTTPTransport()
    fleet = Fleet(lambda deployment: make_provider(deployment, transport, resolve_nothing))
    fleet.apply(given)
    router, queue = Router(fleet, STRATEGIES), Queue(fleet)
    attempts = AttemptLog(lambda: 1, lambda span: {"x-request-id": "call-1"})
    call = a_call(chat(PROMPT, stream=True, **fields), given, now=asyncio.get_running_loop().time())
    try:
        with await queue.acquire_slot(call) as permit:
            async with router.open(call, permit, attempts) as upstream:
                chunks = [await upstream.first()]
                assert await upstream.stream_to(sink_into(chunks))
                assert b"".join(chunks) == TEXT + DONE
    finally:
        await transport.aclose()
    return attempts


async def test_the_decode_engine_gets_what_the_prefill_engine_answered() -> None:
    async with ScriptedServer(prefilled(kv_transfer_params=NIXL)) as p, ScriptedServer(stream) as d:
        attempts = await ask(policy(p.base_url, d.base_url), max_tokens=100, n=1, min_tokens=3)
    first, second = json.loads(p.requests[0].body), json.loads(d.requests[0].body)
    assert p.requests[0].head == d.requests[0].head == "POST /v1/chat/completions HTTP/1.1"
    assert first["kv_transfer_params"] == REQUESTED
    assert first["max_tokens"] == 1
    assert first.keys().isdisjoint({"stream", "stream_options", "min_tokens", "n"})
    assert second["kv_transfer_params"] == NIXL
    assert (second["max_tokens"], second["stream"], second["min_tokens"]) == (100, True, 3)
    shared = ("model", "messages", "cache_salt")
    assert [first[name] for name in shared] == [second[name] for name in shared]
    assert [attempt.outcome for attempt in attempts.done] == ["prefilled", "ok"]


@pytest.mark.parametrize("answer", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}])
async def test_a_server_without_a_connector_answers_no_params(answer: dict[str, Any]) -> None:
    async with ScriptedServer(prefilled(**answer)) as p, ScriptedServer(stream) as d:
        await ask(policy(p.base_url, d.base_url))
    assert "kv_transfer_params" not in json.loads(d.requests[0].body)


async def test_a_prefill_engine_that_answers_an_error_or_nothing_costs_time_only() -> None:
    async def refuse(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(b'{"error": {"message": "no KV connector"}}', "400 Bad Request"))

    async def hang(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None: ...

    for script, outcome in ((refuse, "refused"), (hang, "timeout")):
        async with ScriptedServer(script) as p, ScriptedServer(stream) as d:
            attempts = await ask(policy(p.base_url, d.base_url, classes={"realtime": {"ttft": "1s"}}))
            if outcome == "timeout":
                await p.until_the_client_closed()  # which tells the engine to stop
        assert [attempt.outcome for attempt in attempts.done] == [outcome, "ok"]
        assert "kv_transfer_params" not in json.loads(d.requests[0].body)
