"""Errors of every endpoint have the shape that OpenAI's and Anthropic's descriptions give them, whatever is wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from anthropic.types import ErrorResponse, MessageTokensCount
from pydantic import TypeAdapter

from tests.e2e.processes import DEMO, PATIENCE_SECONDS, Gateway, key
from tests.openai_spec import Validate, validate

__all__ = ["validate"]

pytestmark = pytest.mark.e2e

# Each path of OpenAI's API that takes a JSON body, with the least body that lacks only a model.
OPENAI: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "embeddings": {"input": "x"},
    "responses": {"input": "x"},
    "responses/input_tokens": {"input": "x"},
    "moderations": {"input": "x"},
    "audio/speech": {"input": "x", "voice": "alloy"},
    "images/generations": {"prompt": "x"},
}
FORMS = ("audio/transcriptions", "audio/translations", "images/edits", "images/variations")
STORED = ("responses/resp_none", "files/file-none", "files/file-none/content", "batches/batch_none", "models/none")
PROMPT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
ANTHROPIC = {"messages": {"max_tokens": 5, **PROMPT}, "messages/count_tokens": PROMPT}
_error = TypeAdapter(ErrorResponse)
_count = TypeAdapter(MessageTokensCount)


def send(front: Gateway, method: str, path: str, content: Any = None, **headers: str) -> httpx2.Response:
    given = {"authorization": f"Bearer {key('dev')}", "content-type": "application/json"} | headers
    body = content if isinstance(content, bytes) or content is None else json.dumps(content).encode()
    url = f"{front.url}/v1/{path}"
    return httpx2.request(method, url, content=body, headers=given, timeout=PATIENCE_SECONDS)


def faults(front: Gateway, path: str, body: dict[str, Any]) -> list[tuple[int, httpx2.Response]]:
    """Requests with one fault each, and the status of the error that is expected."""
    return [
        (401, send(front, "POST", path, {**body, "model": DEMO}, authorization="Bearer wrong")),
        (400, send(front, "POST", path, b"{")),
        (400, send(front, "POST", path, b"[1]")),
        (400, send(front, "POST", path, {**body, "model": 5})),
        (404, send(front, "POST", path, {**body, "model": "unknown"})),
        (405, send(front, "PUT", path, {**body, "model": DEMO})),
    ]


@pytest.mark.parametrize("path", OPENAI)
def test_errors_of_openais_endpoints(path: str, local_gateway: Gateway, validate: Validate) -> None:
    for status, reply in faults(local_gateway, path, OPENAI[path]):
        assert reply.status_code == status, reply.text
        validate("ErrorResponse", reply.json())
        assert reply.headers["content-type"].startswith("application/json") and reply.headers["x-request-id"]


def test_errors_of_forms_of_stored_objects_and_of_unknown_paths(local_gateway: Gateway, validate: Validate) -> None:
    form = "multipart/form-data; boundary=b"
    replies = [send(local_gateway, "POST", path, b"--b--", **{"content-type": form}) for path in FORMS]
    replies += [send(local_gateway, "GET", path) for path in STORED]
    replies += [send(local_gateway, "POST", "batches", {"input_file_id": "none"}), send(local_gateway, "GET", "none")]
    for reply in replies:
        assert 400 <= reply.status_code < 500, reply.text
        validate("ErrorResponse", reply.json())


@pytest.mark.parametrize("path", ANTHROPIC)
def test_errors_of_anthropics_endpoints(path: str, local_gateway: Gateway) -> None:
    version = {"anthropic-version": "2023-06-01"}
    replies = [(status, reply) for status, reply in faults(local_gateway, path, ANTHROPIC[path]) if status != 405]
    replies.append(
        (400, send(local_gateway, "POST", path, {**ANTHROPIC[path], "model": DEMO, "messages": 5}, **version))
    )
    for status, reply in replies:
        assert reply.status_code == status, reply.text
        error = _error.validate_json(reply.content, strict=True)
        assert error.type == "error" and error.request_id == reply.headers["request-id"]


def test_counted_tokens_have_anthropics_shape(local_gateway: Gateway) -> None:
    reply = send(local_gateway, "POST", "messages/count_tokens", {**PROMPT, "model": DEMO})
    assert reply.status_code == 200, reply.text
    assert _count.validate_json(reply.content, strict=True).input_tokens > 0
