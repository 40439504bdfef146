"""Rewrites an engine's error for a prompt longer than its context window to Anthropic's error message.

Clients of Anthropic's API match on Anthropic's wording. For example, a coding agent then compacts its conversation or
requests a shorter answer. Each engine words the error differently, but most errors contain the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TOO_LONG = "prompt is too long"

_LIMIT, _PROMPT, _OUTPUT = r"(?P<limit>\d+)", r"(?P<prompt>\d+)", r"(?P<output>\d+)"
_PATTERNS = tuple(
    re.compile(words)
    for words in (
        # the bundled engine
        rf"maximum context length is {_LIMIT} tokens, and the prompt alone has {_PROMPT}",
        rf"maximum context length is {_LIMIT} tokens, but {_PROMPT} in the prompt and {_OUTPUT} to generate",
        # vLLM, then older versions of it
        rf"You passed {_PROMPT} input tokens and requested {_OUTPUT} output tokens\. "
        rf"However, the model's context length is only {_LIMIT} tokens",
        rf"is too large: {_OUTPUT}\. This model's maximum context length is {_LIMIT} tokens "
        rf"and your request has {_PROMPT} input tokens",
        # OpenAI
        rf"maximum context length is {_LIMIT} tokens\. However, you requested \d+ tokens "
        rf"\({_PROMPT} in the messages, {_OUTPUT} in the completion\)",
        rf"maximum context length is {_LIMIT} tokens\. However, your messages resulted in {_PROMPT} tokens",
        # SGLang
        rf"The input \({_PROMPT} tokens\) is longer than the model's context length \({_LIMIT} tokens\)",
        rf"maximum context length of {_LIMIT} tokens\. You requested a total of \d+ tokens: "
        rf"{_PROMPT} tokens from the input messages and {_OUTPUT} tokens for the completion",
        # llama.cpp
        rf"request \({_PROMPT} tokens\) exceeds the available context size \({_LIMIT} tokens\)",
    )
)


def is_overflow(error: Mapping[str, Any]) -> bool:
    """Whether an error object has OpenAI's code or llama.cpp's type for a prompt that exceeds the context window."""
    return error.get("code") == "context_length_exceeded" or error.get("type") == "exceed_context_size_error"


def anthropic_message(message: str) -> str | None:
    """Return Anthropic's message for an engine's context overflow error.

    Returns None for any other error, or if the engine's message has no numbers. If the prompt alone fits, the message
    names `max_tokens`, because a shorter answer then solves the problem.
    """
    for pattern in _PATTERNS:
        if found := pattern.search(message):
            numbers = found.groupdict()
            limit, prompt = int(numbers["limit"]), int(numbers["prompt"])
            if (output := numbers.get("output")) is None or prompt >= limit:
                return f"{TOO_LONG}: {prompt} tokens > {limit} maximum"
            return (
                f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
                "decrease input length or `max_tokens` and try again"
            )
    return None
