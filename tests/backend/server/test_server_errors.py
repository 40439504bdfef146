"""The errors of a running engine: status, message and field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.backend.server.common_requests import CHAT, MESSAGES

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer

pytestmark = pytest.mark.e2e


def test_a_deadline_aborts_the_request(server: RunningServer) -> None:
    body = {"model": server.model, "messages": MESSAGES, "ignore_eos": True, "max_tokens": 8000}
    headers = {"x-request-deadline-ms": "150"}
    reply = httpx2.post(f"{server.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    streamed = httpx2.post(
        f"{server.base_url}/chat/completions", json=body | {"stream": True}, headers=headers, timeout=60
    )
    *_, error, rest = streamed.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert rest == ""
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("warmpath:num_free_blocks") == 1024


REFUSALS: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    (CHAT, {"model": "other"}, 404, "model", "model_not_found"),
    (CHAT, {"max_tokens": 8192}, 400, "max_tokens", "context_length_exceeded"),
    (CHAT, {"max_completion_tokens": 8192}, 400, "max_completion_tokens", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", None),
    (CHAT, {"reasoning_effort": "low"}, 400, "reasoning_effort", None),
    (CHAT, {"logit_bias": {"512": 1}}, 400, "logit_bias", None),
    (CHAT, {"stop_token_ids": [512]}, 400, "stop_token_ids", None),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", None),
    (CHAT, {"bogus": 1}, 400, "bogus", None),
    ("/v1/completions", {"prompt": []}, 400, "prompt", None),
    ("/v1/completions", {"prompt": [[1], "a"]}, 400, "prompt", None),
    ("/v1/completions", {"prompt": [512]}, 400, "prompt", None),
    ("/v1/completions", {"prompt": ["a"] * 9, "n": 128}, 400, "prompt", None),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", None),
    ("/v1/embeddings", {"input": [[]]}, 400, "input", None),
    ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "dimensions", None),
    ("/v1/embeddings", {"input": "x " * 9000}, 400, "input", "context_length_exceeded"),
    ("/rerank", {"query": "a", "documents": ["b"]}, 400, "model", None),
    ("/score", {"text_1": "a", "text_2": "b"}, 400, "model", None),
    ("/tokenize", {}, 400, "prompt", None),
    ("/detokenize", {"tokens": [512]}, 400, "tokens", None),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "code"), REFUSALS)
def test_errors(
    server: RunningServer, path: str, fields: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    body = {"model": server.model} | ({"messages": MESSAGES} if path == CHAT else {}) | fields
    reply = httpx2.post(server.url + path, json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, None),
        ("POST", CHAT, b"[]", 400, None),
        ("POST", CHAT, b"", 400, None),
        ("POST", CHAT, b" " * (32 * 2**20 + 1), 413, "body_too_large"),
        ("GET", CHAT, b"", 405, "method_not_allowed"),
        ("POST", "/v1/responses", b"{}", 404, "unknown_url"),
        ("GET", "/", b"", 404, "unknown_url"),
    ],
)
def test_bodies_that_are_not_requests(
    server: RunningServer, method: str, path: str, content: bytes, status: int, code: str | None
) -> None:
    reply = httpx2.request(method, server.url + path, content=content)
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == code
    assert reply.headers["content-type"] == "application/json"


def test_the_clients_exception_types(server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
