"""Routers that are made for vLLM and SGLang, in front of the engine: vllm-router and sglang-router.

Neither is installed with Warmpath. `WARMPATH_VLLM_ROUTER` and `WARMPATH_SGLANG_ROUTER` name their programs, or they are
on PATH; otherwise the tests are skipped. Both add fields of SGLang to every request, which the engine must accept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.backend.server.conftest import RunningServer
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=20)]

ROUTERS = {"vllm-router": [], "sglang-router": ["launch"]}
START_SECONDS_MAX = 60.0
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
# What a client may send through a router, on top of its prompt.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "sampling": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3, "logprobs": True},
    ),
    "tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"}),
    "schema": ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
    "tool results": (
        "/v1/chat/completions",
        {
            "messages": [
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "dry"},
            ],
            "tools": TOOLS,
        },
    ),
    "completion": ("/v1/completions", {"prompt": "Hello"}),
}


@pytest.fixture(scope="module", params=[*ROUTERS])
def router(
    request: pytest.FixtureRequest, server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a router in front of the tiny model."""
    name: str = request.param
    variable = f"WARMPATH_{name.upper().replace('-', '_')}"
    program = os.environ.get(variable) or shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is neither on PATH nor named by {variable}")
    log = tmp_path_factory.mktemp("routers") / name
    with running([program, *ROUTERS[name]], server.url, log) as url:
        yield url


@contextmanager
def running(command: list[str], worker: str, log: Path) -> Iterator[str]:
    port, metrics = free_port(), free_port()
    options = ["--worker-urls", worker, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options, "--prometheus-port", str(metrics)], stdout=output, stderr=output
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the router serves a request: it has then found out that the engine is healthy."""
    end = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < end and process.poll() is None:
        try:
            if (
                httpx2.post(f"{url}/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 1}).status_code
                < 500
            ):
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the router is not ready: {log.read_text()[-2000:]}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [*REQUESTS])
def test_answers_are_those_of_the_engine(router: str, server: RunningServer, kind: str, stream: bool) -> None:
    path, fields = REQUESTS[kind]
    body = {"model": server.model, "max_tokens": 8, "temperature": 0, "stream": stream, **fields}
    direct, routed = (answer(f"{url}{path}", body) for url in (server.url, router))
    assert routed == direct
    assert routed["text"] or routed["calls"]


def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Text, tool calls and the reason of the end of an answer, whole or streamed."""
    reply = httpx2.post(url, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        bodies = [reply.json()]
    else:
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        bodies = [json.loads(line) for line in lines]
    choices = [choice for each in bodies for choice in each["choices"]]
    pieces = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return {
        "text": "".join(piece.get("content") or piece.get("text") or "" for piece in pieces),
        "calls": [call["function"]["name"] for piece in pieces for call in piece.get("tool_calls") or ()],
        "reason": choices[-1]["finish_reason"],
    }
