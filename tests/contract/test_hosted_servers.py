"""Servers that others run, and their ways of speaking OpenAI's dialect, through the whole gateway.

Each script is written after what the server's documentation and its users say of it, with the fields in which it is
not like OpenAI. What is held to is what a client is told and what a receipt says.
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
from gateway.policy.file import load_policy
from gateway.server.policy_checks import ANYWHERE
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
from tests.gateway.server.test_app import Application, running

DONE = b"data: [DONE]\n\n"
EXAMPLE = Path(__file__).parents[2] / "policies" / "examples" / "hosted.yaml"


def said(text: str | None, *, finish: str | None = None, first: bool = False, **more: Any) -> bytes:
    delta = {"role": "assistant"} if first else {}
    if text is not None:
        delta["content"] = text
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return data({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "x", "choices": choices, **more})


def counted(prompt: int, output: int, total: int | None = None, **more: Any) -> dict[str, Any]:
    total = prompt + output if total is None else total
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total, **more}


def usage(**counts: Any) -> bytes:
    return data({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": counts})


class Ways(NamedTuple):
    """One server's: where it is, what its stream looks like, and what is billed of it."""

    stream: list[bytes]
    billed: dict[str, Any]
    path: str = "/v1"
    deployment: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    taken_out: tuple[bytes, ...] = ()  # what a client that asked for no usage does not get


TOOL_CALL = {
    "index": 0, "id": "call_x", "type": "function", "function": {"name": "weather", "arguments": '{"town":"Rome"}'}
}  # fmt: skip
THOUGHT = {"completion_tokens_details": {"reasoning_tokens": 4}}
GROQ_TIMES = {"queue_time": 0.018, "prompt_time": 0.002, "completion_time": 0.1, "total_time": 0.102}

SERVERS = {
    # usage null until its own chunk; padding; tokens by kind
    "openai": Ways(
        [
            said("", first=True, usage=None, obfuscation="aB3"),
            said("Hi", usage=None, obfuscation="x"),
            said(None, finish="stop", usage=None, service_tier="default"),
            usage(**counted(20, 9, prompt_tokens_details={"cached_tokens": 16}, **THOUGHT)),
            DONE,
        ],
        {"input_uncached": 4, "cache_read": 16, "output": 9, "reasoning": 4, "exact": True, "service_tier": "default"},
        taken_out=(b'"choices":[]',),
    ),
    # first a chunk about the prompt, without any choice
    "azure": Ways(
        [
            data({"choices": [], "prompt_filter_results": [{"prompt_index": 0}], "usage": None}),
            said("Hi", first=True),
            said(None, finish="stop"),
            usage(**counted(5, 1)),
            DONE,
        ],
        {"input_uncached": 5, "output": 1, "exact": True},
        path="/openai/v1",
    ),
    # counts in every chunk, of which the last ones hold; thinking in the total alone
    "gemini": Ways(
        [
            said("H", first=True, usage=counted(8, 1, 60)),
            said("i", finish="stop", usage=counted(8, 3, 90)),
            DONE,
        ],
        {"input_uncached": 8, "output": 82, "reasoning": 79, "exact": False},
        path="/v1beta/openai",
    ),
    # its usage in a place of its own, with times beside the counts
    "groq": Ways(
        [
            said("", first=True, x_groq={"id": "req_01"}),
            said("Hi"),
            said(None, finish="stop", x_groq={"id": "req_01", "usage": counted(30, 2, **GROQ_TIMES)}),
            DONE,
        ],
        {"input_uncached": 30, "output": 2, "exact": True},
        path="/openai/v1",
    ),
    # a tool call as a whole in one chunk
    "ollama": Ways(
        [
            data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}}]}),
            said("", finish="tool_calls", system_fingerprint="fp_ollama"),
            usage(**counted(11, 7)),
            DONE,
        ],
        {"input_uncached": 11, "output": 7, "exact": True},
        taken_out=(b'"choices":[]',),
    ),
    # counts in every chunk unless told not to, and refuses what it does not know
    "tensorrt-llm": Ways(
        [
            said("", first=True),
            said("Hi"),
            said("", finish="stop"),
            usage(**counted(6, 2, prompt_tokens_details={"cached_tokens": 4})),
            DONE,
        ],
        {"input_uncached": 2, "cache_read": 4, "output": 2, "exact": True},
        deployment={"provider": "trtllm"},
        taken_out=(b'"choices":[]',),
    ),
    # refuses stream_options, and tells the usage unasked
    "mistral": Ways(
        [said("", first=True), said("Hi"), said("", finish="stop", usage=counted(9, 2)), DONE],
        {"input_uncached": 9, "output": 2, "exact": True},
        deployment={"leave_out": ("stream_options", "service_tier")},
    ),
    # comments while it waits; a name of its own for what was cached
    "deepseek": Ways(
        [
            b": keep-alive\n\n",
            b": keep-alive\n\n",
            said("", first=True),
            said("Hi"),
            said("", finish="stop", usage=None),
            usage(**counted(50, 2, prompt_cache_hit_tokens=40, prompt_cache_miss_tokens=10)),
            DONE,
        ],
        {"input_uncached": 10, "cache_read": 40, "output": 2, "exact": True},
        taken_out=(b'"choices":[]',),
    ),
    "openrouter": Ways(
        [b": OPENROUTER PROCESSING\n\n", said("Hi", first=True), usage(**counted(4, 1, cost=0.001)), DONE],
        {"input_uncached": 4, "output": 1, "exact": True},
        path="/api/v1",
    ),
}


@asynccontextmanager
async def before(folder: Path, server: ScriptedServer, ways: Ways) -> AsyncIterator[Application]:
    url = f"http://127.0.0.1:{server.port}{ways.path}"
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in ways.deployment.items()}
    served = {"name": "a", "base_url": url, "model": "theirs", **known}
    policy = policy_of(deployments=[served], models=[{"name": "m", "deployments": ["a"]}], tenants=[tenant()])
    async with running(folder, policy) as app:
        yield app


def receipts(app: Application) -> list[dict[str, Any]]:
    rows = [json.loads(line) for file in segments(app.ledger) for line in file.read_bytes().splitlines()]
    return [row for row in rows if row["kind"] == "receipt"]


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "usage asked for"])
async def test_a_stream(tmp_path: Path, name: str, asked: bool) -> None:
    ways = SERVERS[name]

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        fields = json.loads(request.body)
        if name == "mistral" and not fields.keys().isdisjoint(ways.deployment["leave_out"]):
            writer.write(json_response(b'{"object":"error","message":{"detail":[]}}', "422 Unprocessable Entity"))
            return
        options = {"include_usage": True, **({"continuous_usage_stats": False} if name == "tensorrt-llm" else {})}
        assert fields.get("stream_options", options) == options
        assert name != "tensorrt-llm" or "service_tier" not in fields
        writer.write(STREAM_HEAD + b"".join(map(chunked, ways.stream)) + STREAM_END)

    more = {"stream_options": {"include_usage": True}} if asked else {}
    async with ScriptedServer(script) as server, before(tmp_path, server, ways) as app:
        client = await app.ask(chat(stream=True, service_tier="auto", **more))
        assert server.requests[0].head == f"POST {ways.path}/chat/completions HTTP/1.1"
        (receipt,) = receipts(app)
    assert client.status == 200
    assert client.content.endswith(DONE)
    if asked:
        assert client.content == b"".join(ways.stream)  # byte for byte
    if not asked:
        assert not any(part in client.content for part in ways.taken_out)
    told = {name: receipt.get(name, 0) for name in ways.billed}
    assert told == ways.billed
    assert receipt["outcome"] == "complete"


async def asked_of(
    folder: Path, answer: bytes, ways: Ways = SERVERS["openai"], **fields: Any
) -> tuple[Client, list[dict[str, Any]]]:
    """A call, and the receipts, at a server that answers everything so."""

    async def script(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with ScriptedServer(script) as server, before(folder, server, ways) as app:
        return await app.ask(chat(**fields)), receipts(app)


GEMINI_ERROR = {"code": 400, "message": 'Unknown name "seed": Cannot find field.', "status": "INVALID_ARGUMENT"}


async def test_geminis_errors_are_taken_out_of_their_list(tmp_path: Path) -> None:
    answer = json_response(json.dumps([{"error": GEMINI_ERROR}]).encode(), "400 Bad Request")
    client, _ = await asked_of(tmp_path, answer, SERVERS["gemini"])
    assert (client.status, client.json) == (400, {"error": GEMINI_ERROR})


async def test_a_list_of_something_else_stays(tmp_path: Path) -> None:
    client, _ = await asked_of(tmp_path, json_response(b'[1, {"a": 2}]', "400 Bad Request"))
    assert (client.status, client.json) == (400, [1, {"a": 2}])


async def test_gemini_says_400_to_a_key_of_ours(tmp_path: Path) -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]
    error = {"code": 400, "message": "API key not valid: AIza-secret", "details": details}
    answer = json_response(json.dumps([{"error": error}]).encode(), "400 Bad Request")
    async with asyncio.timeout(60):
        client, _ = await asked_of(tmp_path, answer, SERVERS["gemini"])
    assert client.status == 502
    assert b"AIza" not in client.content


async def test_gemini_says_in_the_body_when_to_come_back(tmp_path: Path) -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37s"}]
    error = {"code": 429, "message": "quota", "status": "RESOURCE_EXHAUSTED", "details": details}
    answer = json_response(json.dumps([{"error": error}]).encode(), "429 Too Many Requests")
    client, _ = await asked_of(tmp_path, answer, SERVERS["gemini"])
    assert client.status == 503
    assert 35 <= int(client.headers["retry-after"]) <= 37


async def test_errors_that_are_flat_are_passed_on(tmp_path: Path) -> None:
    """As TensorRT-LLM has them, which OpenAI's clients read, too."""
    error = {"object": "error", "message": "no such field", "type": "BadRequestError", "param": None, "code": 400}
    client, _ = await asked_of(tmp_path, json_response(json.dumps(error).encode(), "400 Bad Request"))
    assert (client.status, client.json) == (400, error)


@pytest.mark.parametrize(
    "failure",
    [
        said("", finish="error", error={"code": "server_error", "message": "Provider disconnected"}),
        b'event: error\ndata: {"error":{"message":"out of capacity","type":"server_error"}}\n\n',
        data({"error": "llama runner process has terminated"}),
        b'{"error":{"message":"llama runner process has terminated"}}\n',  # no event at all, and then the end
    ],
    ids=["openrouter", "groq", "ollama", "ollama, bare"],
)
async def test_an_error_behind_text_is_told_and_is_no_end(tmp_path: Path, failure: bytes) -> None:
    answer = STREAM_HEAD + chunked(said("Hi", first=True)) + chunked(failure) + STREAM_END
    client, (receipt,) = await asked_of(tmp_path, answer, stream=True)
    assert client.content.startswith(said("Hi", first=True))
    assert json.loads(client.content.rstrip().rsplit(b"data: ", 1)[1])["error"]["code"] == "upstream_cut"
    assert DONE not in client.content
    assert receipt["outcome"] == "upstream_cut"


def test_the_example_has_them_all() -> None:
    policy = load_policy(EXAMPLE, checks=ANYWHERE)
    served = {deployment.name: deployment for deployment in policy.deployments}
    assert served.keys() == {"anthropic", "openai", "gemini", "groq", "mistral", "ollama", "tensorrt-llm"}
    assert served["anthropic"].provider == "anthropic"
    for name in served.keys() & SERVERS.keys():
        assert served[name].base_url.endswith(SERVERS[name].path)
        for field, value in SERVERS[name].deployment.items():
            assert getattr(served[name], field) == value
    keys = {name for name, deployment in served.items() if deployment.api_key is not None}
    assert keys == served.keys() - {"ollama", "tensorrt-llm"}
    assert {name for model in policy.models for name in model.deployments} == served.keys()
    assert all(part in EXAMPLE.read_text() for part in ("warmpath serve", *yaml.safe_load(EXAMPLE.read_text())))
