"""Every kind of response against OpenAI's published OpenAPI description, if a copy is available."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.openai_spec import Validate, completion_chunk

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer

pytestmark = pytest.mark.e2e


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
        validate("CreateCompletionResponse", completion_chunk(chunk))


def test_the_rest(server: RunningServer, validate: Validate) -> None:
    body = {"model": server.model, "input": ["a", "b"]}
    validate("CreateEmbeddingResponse", httpx2.post(f"{server.base_url}/embeddings", json=body).json())
    validate("ListModelsResponse", httpx2.get(f"{server.base_url}/models").json())
    validate("Model", httpx2.get(f"{server.base_url}/models/{server.model}").json())
    validate("ErrorResponse", httpx2.get(f"{server.base_url}/nowhere").json())
    validate("ErrorResponse", httpx2.post(f"{server.base_url}/embeddings", json={}).json())
