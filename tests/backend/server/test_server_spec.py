"""Every kind of reply against OpenAI's published OpenAPI description, where a copy of it is at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import jsonschema_rs
import pytest

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer

pytestmark = pytest.mark.e2e

SHARED = Path(os.environ.get("WARMPATH_SHARED", Path(__file__).parents[4] / "shared"))
SPEC = SHARED / "openai-spec" / "openapi.json"

Validate = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def validate() -> Validate:
    if not SPEC.exists():
        pytest.skip(f"{SPEC} is not there")
    components = _with_nulls(json.loads(SPEC.read_text())["components"])

    def validate(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        jsonschema_rs.validator_for(schema).validate(value)

    return validate


def _with_nulls(node: Any) -> Any:
    """`nullable: true` is 3.0's way to say it; the description claims to be 3.1, where nobody reads it."""
    if isinstance(node, list):
        return [_with_nulls(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _with_nulls(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if node.get("nullable") is True else plain


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    reply = httpx2.post(server.base_url + path, json=body | {"stream": True})
    *frames, done, _ = reply.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.mark.parametrize(
    "extra", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"service_tier": "auto"}, {"stop": "e"}]
)
def test_chat(server: RunningServer, validate: Validate, extra: dict[str, Any]) -> None:
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, **extra}
    validate("CreateChatCompletionResponse", httpx2.post(f"{server.base_url}/chat/completions", json=body).json())
    for options in ({}, {"stream_options": {"include_usage": True}}):
        for chunk in events(server, "/chat/completions", body | options):
            validate("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True}])
def test_completions(server: RunningServer, validate: Validate, extra: dict[str, Any]) -> None:
    body = {"model": server.model, "prompt": "Hello", "max_tokens": 6, "seed": 1, **extra}
    validate("CreateCompletionResponse", httpx2.post(f"{server.base_url}/completions", json=body).json())
    for chunk in events(server, "/completions", body):
        for choice in chunk["choices"]:
            # The description has no null here, which OpenAI's own chunks have until the last one.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        validate("CreateCompletionResponse", chunk)


def test_the_rest(server: RunningServer, validate: Validate) -> None:
    body = {"model": server.model, "input": ["a", "b"]}
    validate("CreateEmbeddingResponse", httpx2.post(f"{server.base_url}/embeddings", json=body).json())
    validate("ListModelsResponse", httpx2.get(f"{server.base_url}/models").json())
    validate("Model", httpx2.get(f"{server.base_url}/models/{server.model}").json())
    validate("ErrorResponse", httpx2.get(f"{server.base_url}/nowhere").json())
    validate("ErrorResponse", httpx2.post(f"{server.base_url}/embeddings", json={}).json())
