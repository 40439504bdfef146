"""Engines' errors for a context that is too short, reworded as Anthropic's clients expect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import UpstreamRefused
from gateway.endpoints.messages.errors import error_response

TOO_LONG = "prompt is too long: 9000 tokens > 8192 maximum"
TOO_MUCH = (
    "input length and `max_tokens` exceed context limit: 8000 + 1024 > 8192, "
    "decrease input length or `max_tokens` and try again"
)


def reworded(message: str, **more: Any) -> str:
    content = json.dumps({"error": {"message": message, "type": "invalid_request_error", **more}}).encode()
    status, body = error_response(UpstreamRefused(400, content, "application/json"), "req_1")
    assert status == 400
    text: str = json.loads(body)["error"]["message"]
    return text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("This model's maximum context length is 8192 tokens, and the prompt alone has 9000.", TOO_LONG),
        (
            "This model's maximum context length is 8192 tokens, but 8000 in the prompt and 1024 to generate were "
            "asked for.",
            TOO_MUCH,
        ),
        (
            "You passed 8000 input tokens and requested 1024 output tokens. However, the model's context length is "
            "only 8192 tokens, resulting in a maximum input length of 7168 tokens. Please reduce the length of the "
            "input prompt. (parameter=input_tokens, value=8000)",
            TOO_MUCH,
        ),
        (
            "You passed 9000 input tokens and requested 0 output tokens. However, the model's context length is only "
            "8192 tokens, resulting in a maximum input length of 8192 tokens.",
            TOO_LONG,
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 1024. This model's maximum context length is 8192 "
            "tokens and your request has 8000 input tokens (1024 > 8192 - 8000).",
            TOO_MUCH,
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9024 tokens (8000 in the "
            "messages, 1024 in the completion). Please reduce the length of the messages or completion.",
            TOO_MUCH,
        ),
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. "
            "Please reduce the length of the messages.",
            TOO_LONG,
        ),
        ("The input (9000 tokens) is longer than the model's context length (8192 tokens).", TOO_LONG),
        (
            "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of "
            "9024 tokens: 8000 tokens from the input messages and 1024 tokens for the completion.",
            TOO_MUCH,
        ),
        ("request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it", TOO_LONG),
        ("The model `m` does not exist.", "The model `m` does not exist."),
    ],
)
def test_an_engines_message_is_rewritten_with_its_numbers(message: str, expected: str) -> None:
    assert reworded(message) == expected


@pytest.mark.parametrize("how", [{"code": "context_length_exceeded"}, {"type": "exceed_context_size_error"}])
def test_an_overflow_without_numbers_is_recognised_by_code_or_type(how: dict[str, str]) -> None:
    assert reworded("too many tokens", **how) == "prompt is too long: too many tokens"
    assert reworded(TOO_LONG, **how) == TOO_LONG
    assert reworded("`max_tokens` is too large", param="max_tokens", **how) == "`max_tokens` is too large"
