"""Reads Ollama's token counts: the prompt, and the output including reasoning, at the top level of the body.

Ollama does not report cached tokens.
"""

from __future__ import annotations

from gateway.providers.usage.base import RawUsage, bounded_usage
from gateway.types import Usage


def matches(raw: RawUsage) -> bool:
    """Whether the counts have the names of Ollama's own API. Ollama's OpenAI-compatible API uses OpenAI's names."""
    return raw.prompt_eval_count is not None or raw.eval_count is not None


def normalize(raw: RawUsage) -> Usage:
    """Convert the counts to buckets. The result is not `exact` if the prompt's count is missing."""
    # If the count is missing, Ollama did not evaluate the prompt, and the prompt's length is unknown.
    has_prompt = raw.prompt_eval_count is not None
    return bounded_usage(prompt=raw.prompt_eval_count or 0, output=raw.eval_count or 0, agree=has_prompt)
