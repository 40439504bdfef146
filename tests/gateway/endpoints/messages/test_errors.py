"""Errors as Anthropic's clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import (
    BadRequest,
    BodyTooLarge,
    BudgetSpent,
    Forbidden,
    GatewayError,
    InternalError,
    LimitReached,
    ModelNotFound,
    Overloaded,
    StorageUnavailable,
    Unauthenticated,
    UpstreamBusy,
    UpstreamCut,
    UpstreamError,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.endpoints.messages.errors import failure, refusal


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (Unauthenticated("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (ModelNotFound("x"), 404, "not_found_error"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (LimitReached("x", retry_after_seconds=1), 429, "rate_limit_error"),
        (BudgetSpent("x"), 429, "rate_limit_error"),
        (InternalError("x"), 500, "api_error"),
        (UpstreamError("x"), 502, "api_error"),
        (StorageUnavailable("x"), 503, "api_error"),
        (UpstreamTimeout("x"), 504, "timeout_error"),
        (Overloaded("x", retry_after_seconds=1), 529, "overloaded_error"),
        (UpstreamBusy("x"), 529, "overloaded_error"),
    ],
)
def test_every_error_has_a_type_of_anthropics(error: GatewayError, status: int, kind: str) -> None:
    told, body = refusal(error, "req_1")
    said: dict[str, Any] = json.loads(body)
    assert (told, said["type"], said["request_id"]) == (status, "error", "req_1")
    assert (said["error"]["type"], said["error"]["message"]) == (kind, "x")
    assert said["error"].get("details", {}).get("error_code") == error.code


def test_what_is_known_besides_stands_in_the_details() -> None:
    _, body = refusal(BadRequest("no", param="tools[0]"), "req_1")
    assert json.loads(body)["error"]["details"] == {"param": "tools[0]"}
    _, body = refusal(UpstreamError("no", attempts=[{"deployment": "a"}]), "req_1")
    assert json.loads(body)["error"]["details"] == {"error_code": "upstream_error", "attempts": [{"deployment": "a"}]}


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ("stop[0]", "stop_sequences[0]"),
        ("stop", "stop_sequences"),
        ("reasoning_effort", "output_config.effort"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format.type", "output_config.format.type"),
        ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("tools[3].function.parameters.type", "tools[3].input_schema.type"),
        ("tools[3].function.name", "tools[3].name"),
        ("messages[4].content[0].type", "messages"),
        ("max_tokens", "max_tokens"),
    ],
)
def test_what_a_server_has_refused_has_the_name_that_the_client_gave_it(theirs: str, own: str) -> None:
    refused = {"error": {"message": f"`{theirs}` is wrong, and `x{theirs}` is not.", "param": theirs}}
    _, body = refusal(UpstreamRefused(400, json.dumps(refused).encode(), "application/json"), "req_1")
    error = json.loads(body)["error"]
    assert (error["message"], error["details"]["param"]) == (f"`{own}` is wrong, and `x{theirs}` is not.", own)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"error": 7}', 'the upstream returned status 422: {"error": 7}'),
        (b"<html>", "the upstream returned status 422: <html>"),
        pytest.param(b"[" * 9000, "the upstream returned status 422: " + "[" * 300, id="too deep"),
        (b"\xff" * 9000, "the upstream returned status 422: " + "\ufffd" * 300),
    ],
)
def test_a_servers_refusal_is_told_in_its_own_words(content: bytes, message: str) -> None:
    status, body = refusal(UpstreamRefused(422, content, "application/json"), "req_1")
    assert status == 422
    assert json.loads(body)["error"] == {
        "type": "invalid_request_error", "message": message, "details": {"error_code": "refused_by_upstream"},
    }  # fmt: skip


def test_a_failure_in_a_stream_is_an_event_of_its_own() -> None:
    name, data, *rest = failure(UpstreamCut("cut"), "req_1").split(b"\n")
    assert (name, rest) == (b"event: error", [b"", b""])
    said = json.loads(data.removeprefix(b"data: "))
    assert (said["type"], said["error"]["type"], said["error"]["message"]) == ("error", "api_error", "cut")
