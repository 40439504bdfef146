"""Hosted services and their variants of OpenAI's dialect, through the whole gateway.

Each script follows the service's documentation and reports of its users, with the fields in which it differs from
OpenAI. The tests check what a client receives and what the receipt bills.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gateway.billing.ledger.chain import segments
from gateway.billing.ledger.rows import complete_receipt
from gateway.policy.file import load_policy
from gateway.server.policy_checks import ANYWHERE
from tests.e2e.processes import complete_lines
from tests.gateway.harness import Client, chat, policy_of, tenant
from tests.gateway.providers.scripted_server import (
    STREAM_END,
    STREAM_HEAD,
    ReceivedRequest,
    ScriptedServer,
    chunked,
    json_response,
)
from tests.gateway.providers.wires import data
from tests.gateway.server.application import Application, running

DONE = b"data: [DONE]\n\n"
EXAMPLE = Path(__file__).parents[2] / "policies" / "examples" / "hosted.yaml"


def text_chunk(text: str | None, *, finish: str | None = None, first: bool = False, **more: Any) -> bytes:
    delta = {"role": "assistant"} if first else {}
    if text is not None:
        delta["content"] = text
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return data({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "x", "choices": choices, **more})


def counts_of(prompt: int, output: int, total: int | None = None, **more: Any) -> dict[str, Any]:
    total = prompt + output if total is None else total
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total, **more}


def usage(**counts: Any) -> bytes:
    return data({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": counts})


class Service(NamedTuple):
    """One service: its stream, what is billed for it, its path, and how the policy configures it."""

    stream: list[bytes]
    billed: dict[str, Any]
    path: str = "/v1"
    deployment: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    removed: tuple[bytes, ...] = ()  # parts that a client does not get unless it requested usage


TOOL_CALL = {
    "index": 0, "id": "call_x", "type": "function", "function": {"name": "weather", "arguments": '{"town":"Rome"}'}
}  # fmt: skip
ANONYMOUS = {"created": 1, "model": "x", "object": "chat.completion.chunk"}
REASONING: dict[str, Any] = {"completion_tokens_details": {"reasoning_tokens": 4}}
GROQ_TIMES: dict[str, Any] = {"queue_time": 0.018, "prompt_time": 0.002, "completion_time": 0.1, "total_time": 0.102}

SERVICES = {
    # usage is null until its own chunk; padding; tokens by kind
    "openai": Service(
        [
            text_chunk("", first=True, usage=None, obfuscation="aB3"),
            text_chunk("Hi", usage=None, obfuscation="x"),
            text_chunk(None, finish="stop", usage=None, service_tier="default"),
            usage(**counts_of(20, 9, prompt_tokens_details={"cached_tokens": 16}, **REASONING)),
            DONE,
        ],
        {"input_uncached": 4, "cache_read": 16, "output": 9, "reasoning": 4, "exact": True, "service_tier": "default"},
        removed=(b'"choices":[]',),
    ),
    # the first chunk is about the prompt and has no choice
    "azure": Service(
        [
            data({"choices": [], "prompt_filter_results": [{"prompt_index": 0}], "usage": None}),
            text_chunk("Hi", first=True),
            text_chunk(None, finish="stop"),
            usage(**counts_of(5, 1)),
            DONE,
        ],
        {"input_uncached": 5, "output": 1, "exact": True},
        path="/openai/v1",
    ),
    # usage in every chunk, of which the last is valid; thinking is only in the total
    "gemini": Service(
        [
            text_chunk("H", first=True, usage=counts_of(8, 1, 60)),
            text_chunk("i", finish="stop", usage=counts_of(8, 3, 90)),
            DONE,
        ],
        {"input_uncached": 8, "output": 82, "remainder": 79, "exact": False},
        path="/v1beta/openai",
    ),
    # usage in a field of its own, with times beside the counts
    "groq": Service(
        [
            text_chunk("", first=True, x_groq={"id": "req_01"}),
            text_chunk("Hi"),
            text_chunk(None, finish="stop", x_groq={"id": "req_01", "usage": counts_of(30, 2, **GROQ_TIMES)}),
            DONE,
        ],
        {"input_uncached": 30, "output": 2, "exact": True},
        path="/openai/v1",
    ),
    # a whole tool call in one chunk
    "ollama": Service(
        [
            data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}}]}),
            text_chunk("", finish="tool_calls", system_fingerprint="fp_ollama"),
            usage(**counts_of(11, 7)),
            DONE,
        ],
        {"input_uncached": 11, "output": 7, "exact": True},
        removed=(b'"choices":[]',),
    ),
    # usage in every chunk unless switched off; rejects unknown fields
    "tensorrt-llm": Service(
        [
            text_chunk("", first=True),
            text_chunk("Hi"),
            text_chunk("", finish="stop"),
            usage(**counts_of(6, 2, prompt_tokens_details={"cached_tokens": 4})),
            DONE,
        ],
        {"input_uncached": 2, "cache_read": 4, "output": 2, "exact": True},
        deployment={"provider": "trtllm"},
        removed=(b'"choices":[]',),
    ),
    # rejects stream_options, and always sends usage
    "mistral": Service(
        [text_chunk("", first=True), text_chunk("Hi"), text_chunk("", finish="stop", usage=counts_of(9, 2)), DONE],
        {"input_uncached": 9, "output": 2, "exact": True},
        deployment={"leave_out": ("stream_options", "service_tier")},
    ),
    # comments while it waits; its own name for cached tokens
    "deepseek": Service(
        [
            b": keep-alive\n\n",
            b": keep-alive\n\n",
            text_chunk("", first=True),
            text_chunk("Hi"),
            text_chunk("", finish="stop", usage=None),
            usage(**counts_of(50, 2, prompt_cache_hit_tokens=40, prompt_cache_miss_tokens=10)),
            DONE,
        ],
        {"input_uncached": 10, "cache_read": 40, "output": 2, "exact": True},
        removed=(b'"choices":[]',),
    ),
    # usage so far in every chunk, and the role; errors without an object around them
    "lmdeploy": Service(
        [
            text_chunk("H", first=True, usage=counts_of(12, 1)),
            text_chunk("i", first=True, usage=counts_of(12, 2)),
            text_chunk("", first=True, finish="stop", usage=counts_of(12, 3)),
            DONE,
        ],
        {"input_uncached": 12, "output": 3, "exact": True},
    ),
    # no ids; errors are a text
    "openvino-model-server": Service(
        [
            data({"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}], **ANONYMOUS}),
            data({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}], **ANONYMOUS}),
            data({"choices": [], "usage": counts_of(22, 2), **ANONYMOUS}),
            DONE,
        ],
        {"input_uncached": 22, "output": 2, "exact": True},
        path="/v3",
        removed=(b'"choices":[]',),
    ),
    # reasoning tokens beside the counts
    "sglang": Service(
        [
            text_chunk("", first=True, usage=None),
            text_chunk("Hi", usage=None),
            text_chunk(None, finish="stop", matched_stop=151645, usage=None),
            usage(**counts_of(40, 8, prompt_tokens_details={"cached_tokens": 32}, reasoning_tokens=3)),
            DONE,
        ],
        {"input_uncached": 8, "cache_read": 32, "output": 8, "reasoning": 3, "exact": True},
        deployment={"provider": "sglang"},
        removed=(b'"choices":[]',),
    ),
    # its documentation describes OpenAI's API without differences
    "general-compute": Service(
        [
            text_chunk("", first=True),
            data({"choices": [{"index": 0, "delta": {"tool_calls": [TOOL_CALL]}, "finish_reason": None}]}),
            text_chunk(None, finish="tool_calls"),
            usage(**counts_of(60, 12)),
            DONE,
        ],
        {"input_uncached": 60, "output": 12, "exact": True},
        removed=(b'"choices":[]',),
    ),
    "openrouter": Service(
        [b": OPENROUTER PROCESSING\n\n", text_chunk("Hi", first=True), usage(**counts_of(4, 1, cost=0.001)), DONE],
        {"input_uncached": 4, "output": 1, "exact": True},
        path="/api/v1",
    ),
}


@asynccontextmanager
async def gateway_for(folder: Path, server: ScriptedServer, service: Service) -> AsyncIterator[Application]:
    url = f"http://127.0.0.1:{server.port}{service.path}"
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in service.deployment.items()}
    served = {"name": "a", "base_url": url, "model": "theirs", **known}
    policy = policy_of(deployments=[served], models=[{"name": "m", "deployments": ["a"]}], tenants=[tenant()])
    async with running(folder, policy) as app:
        yield app


def receipts(app: Application) -> list[dict[str, Any]]:
    rows = [json.loads(line) for file in segments(app.ledger) for line in complete_lines(file)]
    return [complete_receipt(row) for row in rows if row["kind"] == "receipt"]


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("include_usage", [False, True], ids=["without usage", "with usage"])
async def test_a_stream_is_passed_on_and_billed(tmp_path: Path, name: str, include_usage: bool) -> None:
    service = SERVICES[name]

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        if not request.body:  # counters, which only some providers read
            writer.write(json_response(b"", "404 Not Found"))
            return
        fields = json.loads(request.body)
        if name == "mistral" and not fields.keys().isdisjoint(service.deployment["leave_out"]):
            writer.write(json_response(b'{"object":"error","message":{"detail":[]}}', "422 Unprocessable Entity"))
            return
        options = {"include_usage": True, **({"continuous_usage_stats": False} if name == "tensorrt-llm" else {})}
        assert fields.get("stream_options", options) == options
        assert name != "tensorrt-llm" or "service_tier" not in fields
        writer.write(STREAM_HEAD + b"".join(map(chunked, service.stream)) + STREAM_END)

    more = {"stream_options": {"include_usage": True}} if include_usage else {}
    async with ScriptedServer(script) as server, gateway_for(tmp_path, server, service) as app:
        client = await app.ask(chat(stream=True, service_tier="auto", **more))
        posts = [request.head for request in server.requests if request.head.startswith("POST")]
        assert posts[0] == f"POST {service.path}/chat/completions HTTP/1.1"
        (receipt,) = receipts(app)
    assert client.status == 200
    assert client.content.endswith(DONE)
    if include_usage:
        assert client.content == b"".join(service.stream)  # byte for byte
    if not include_usage:
        assert not any(part in client.content for part in service.removed)
    billed = {name: receipt.get(name, 0) for name in service.billed}
    assert billed == service.billed
    assert receipt["outcome"] == "complete"


async def call_service(
    folder: Path, answer: bytes, service: Service = SERVICES["openai"], **fields: Any
) -> tuple[Client, list[dict[str, Any]]]:
    """Send a call to a service that always answers with `answer`. Returns the client and the receipts."""

    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with ScriptedServer(script) as server, gateway_for(folder, server, service) as app:
        return await app.ask(chat(**fields)), receipts(app)


GEMINI_ERROR = {"code": 400, "message": 'Unknown name "seed": Cannot find field.', "status": "INVALID_ARGUMENT"}


async def test_gemini_s_error_is_taken_out_of_its_list(tmp_path: Path) -> None:
    answer = json_response(json.dumps([{"error": GEMINI_ERROR}]).encode(), "400 Bad Request")
    client, _ = await call_service(tmp_path, answer, SERVICES["gemini"])
    assert (client.status, client.json) == (400, {"error": GEMINI_ERROR})


async def test_an_error_body_that_is_another_list_is_unchanged(tmp_path: Path) -> None:
    client, _ = await call_service(tmp_path, json_response(b'[1, {"a": 2}]', "400 Bad Request"))
    assert (client.status, client.json) == (400, [1, {"a": 2}])


async def test_gemini_s_400_for_our_key_is_not_passed_on(tmp_path: Path) -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]
    error = {"code": 400, "message": "API key not valid: AIza-secret", "details": details}
    answer = json_response(json.dumps([{"error": error}]).encode(), "400 Bad Request")
    async with asyncio.timeout(60):
        client, _ = await call_service(tmp_path, answer, SERVICES["gemini"])
    assert client.status == 502
    assert b"AIza" not in client.content


async def test_gemini_s_retry_delay_in_the_body_becomes_retry_after(tmp_path: Path) -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37s"}]
    error = {"code": 429, "message": "quota", "status": "RESOURCE_EXHAUSTED", "details": details}
    answer = json_response(json.dumps([{"error": error}]).encode(), "429 Too Many Requests")
    client, _ = await call_service(tmp_path, answer, SERVICES["gemini"])
    assert client.status == 503
    assert 35 <= int(client.headers["retry-after"]) <= 37


async def test_a_flat_error_gets_openais_form(tmp_path: Path) -> None:
    """TensorRT-LLM sends such errors."""
    error = {"object": "error", "message": "no such field", "type": "BadRequestError", "param": None, "code": 400}
    client, _ = await call_service(tmp_path, json_response(json.dumps(error).encode(), "400 Bad Request"))
    assert client.status == 400
    assert client.json["error"]["message"].endswith("no such field")
    assert client.json["error"]["type"] == "invalid_request_error"


async def test_an_error_that_is_a_text_gets_openais_form(tmp_path: Path) -> None:
    """OpenVINO Model Server sends such errors."""
    answer = json_response(b'{"error": "Mediapipe execution failed. max_tokens is too large"}', "400 Bad Request")
    client, _ = await call_service(tmp_path, answer, SERVICES["openvino-model-server"])
    assert client.status == 400
    assert client.json["error"]["message"].endswith("max_tokens is too large")
    assert client.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "failure",
    [
        text_chunk("", finish="error", error={"code": "server_error", "message": "Provider disconnected"}),
        b'event: error\ndata: {"error":{"message":"out of capacity","type":"server_error"}}\n\n',
        data({"error": "llama runner process has terminated"}),
        b'{"error":{"message":"llama runner process has terminated"}}\n',  # not an event, followed by the end
    ],
    ids=["openrouter", "groq", "ollama", "ollama, bare"],
)
async def test_an_error_after_text_cuts_the_stream(tmp_path: Path, failure: bytes) -> None:
    answer = STREAM_HEAD + chunked(text_chunk("Hi", first=True)) + chunked(failure) + STREAM_END
    client, (receipt,) = await call_service(tmp_path, answer, stream=True)
    assert client.content.startswith(text_chunk("Hi", first=True))
    assert json.loads(client.content.rstrip().rsplit(b"data: ", 1)[1])["error"]["code"] == "upstream_cut"
    assert DONE not in client.content
    assert receipt["outcome"] == "upstream_cut"


def test_the_example_policy_has_all_services() -> None:
    policy = load_policy(EXAMPLE, checks=ANYWHERE)
    served = {deployment.name: deployment for deployment in policy.deployments}
    assert served.keys() == {"anthropic", "openai", "gemini", "groq", "mistral", "ollama", "tensorrt-llm"}
    assert served["anthropic"].provider == "anthropic"
    for name in served.keys() & SERVICES.keys():
        assert served[name].base_url.endswith(SERVICES[name].path)
        for field, value in SERVICES[name].deployment.items():
            assert getattr(served[name], field) == value
    keys = {name for name, deployment in served.items() if deployment.api_key is not None}
    assert keys == served.keys() - {"ollama", "tensorrt-llm"}
    assert {name for model in policy.models for name in model.deployments} == served.keys()
    assert all(part in EXAMPLE.read_text() for part in ("warmpath serve", *yaml.safe_load(EXAMPLE.read_text())))
