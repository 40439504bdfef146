"""Agent loops of current SDKs with their defaults: Anthropic's tool runner, and Codex's request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.tools.memory import BetaLocalFilesystemMemoryTool

from tests.e2e.faults.upstreams import Request, Upstreams, listening
from tests.e2e.processes import PRICE, Gateway, gateway, key, simple_policy
from tests.gateway.providers.scripted_server import json_response

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


async def agent(request: Request) -> None:
    """Call the first tool once, then answer with its result."""
    last = request.body["messages"][-1]
    if last["role"] == "tool":
        message: dict[str, Any] = {"role": "assistant", "content": f"It says {last['content']}."}
        reason = "stop"
    else:
        function = request.body["tools"][0]["function"]
        arguments = dict.fromkeys(function["parameters"]["properties"], "Rome")
        if function["name"] == "memory":
            arguments = {"command": "create", "path": "/memories/city.md", "file_text": "Rome"}
        named = {"name": function["name"], "arguments": json.dumps(arguments)}
        call = {"id": "c1", "type": "function", "function": named}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reason = "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    await request.write(json_response(json.dumps(answer).encode()))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Upstreams]]:
    with listening({"agent": agent}) as upstreams:
        url = f"http://127.0.0.1:{upstreams.ports['agent']}/v1"
        deployments = [{"name": "agent", "base_url": url, "model": "served", "price": PRICE}]
        policy = simple_policy(
            "http://unused", deployments=deployments, models=[{"name": "m", "deployments": ["agent"]}]
        )
        with gateway(tmp_path_factory.mktemp("agents"), policy) as started:
            yield started, upstreams


def test_anthropics_tool_runner_goes_on_without_threads(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Look the weather up.

        Args:
            city: The name of the city.
        """
        return f"sunny in {city}"

    with anthropic.Anthropic(base_url=front_gateway.url, api_key=key("dev"), max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=100, tools=[weather], messages=[{"role": "user", "content": "Weather?"}]
        )
        last = runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == ["It says sunny in Rome."]
    assert [len(request.body["messages"]) for request in upstreams.requests["agent"]] == [1, 3]


def test_anthropics_own_memory_tool_runs_with_any_model(front: tuple[Gateway, Upstreams], tmp_path: Path) -> None:
    front_gateway, _ = front
    memory = BetaLocalFilesystemMemoryTool(str(tmp_path))
    with anthropic.Anthropic(base_url=front_gateway.url, api_key=key("dev"), max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=100, tools=[memory], messages=[{"role": "user", "content": "Remember the city."}]
        )
        last = runner.until_done()
    assert (tmp_path / "memories" / "city.md").read_text() == "Rome"
    assert "It says" in "".join(block.text for block in last.content if block.type == "text")


def test_codex_with_its_defaults(front: tuple[Gateway, Upstreams]) -> None:
    front_gateway, upstreams = front
    patch = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    body = {
        "model": "m",
        "instructions": "You are a coding agent.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]}],
        "tools": [
            {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": patch},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto", "context": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "store": False,
        "prompt_cache_key": "c",
    }
    reply = front_gateway.post("responses", body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-warmpath-dropped-tools"] == "web_search"
    (call,) = reply.json()["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", "Rome")
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "patched"}
    last = front_gateway.post("responses", {**body, "input": [*body["input"], call, output]})  # type: ignore[misc]
    assert last.json()["output"][0]["content"][0]["text"] == "It says patched."
    assert [tool["function"]["name"] for tool in upstreams.requests["agent"][-1].body["tools"]] == ["apply_patch"]
