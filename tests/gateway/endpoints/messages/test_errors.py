"""Errors in Anthropic's format."""

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
from gateway.endpoints.messages.errors import error_event, error_response


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
def test_every_error_has_one_of_anthropics_types(error: GatewayError, status: int, kind: str) -> None:
    answered, body = error_response(error, "req_1")
    parsed: dict[str, Any] = json.loads(body)
    assert (answered, parsed["type"], parsed["request_id"]) == (status, "error", "req_1")
    assert (parsed["error"]["type"], parsed["error"]["message"]) == (kind, "x")
    assert parsed["error"].get("details", {}).get("error_code") == error.code


def test_further_fields_are_in_the_details() -> None:
    _, body = error_response(BadRequest("no", param="tools[0]"), "req_1")
    assert json.loads(body)["error"]["details"] == {"param": "tools[0]"}
    _, body = error_response(UpstreamError("no", attempts=[{"deployment": "a"}]), "req_1")
    assert json.loads(body)["error"]["details"] == {"error_code": "upstream_error", "attempts": [{"deployment": "a"}]}


@pytest.mark.parametrize(
    ("chat_name", "client_name"),
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
def test_a_rejected_field_has_the_clients_name(chat_name: str, client_name: str) -> None:
    rejection = {"error": {"message": f"`{chat_name}` is wrong, and `x{chat_name}` is not.", "param": chat_name}}
    _, body = error_response(UpstreamRefused(400, json.dumps(rejection).encode(), "application/json"), "req_1")
    error = json.loads(body)["error"]
    assert (error["message"], error["details"]["param"]) == (
        f"`{client_name}` is wrong, and `x{chat_name}` is not.",
        client_name,
    )


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
def test_an_engines_error_message_is_passed_on(content: bytes, message: str) -> None:
    status, body = error_response(UpstreamRefused(422, content, "application/json"), "req_1")
    assert status == 422
    assert json.loads(body)["error"] == {
        "type": "invalid_request_error", "message": message, "details": {"error_code": "refused_by_upstream"},
    }  # fmt: skip


def test_an_error_in_a_stream_is_an_error_event() -> None:
    name, data, *rest = error_event(UpstreamCut("cut"), "req_1").split(b"\n")
    assert (name, rest) == (b"event: error", [b"", b""])
    parsed = json.loads(data.removeprefix(b"data: "))
    assert (parsed["type"], parsed["error"]["type"], parsed["error"]["message"]) == ("error", "api_error", "cut")
