"""Ollama's token counts, which are in the body itself: the whole prompt, and the whole output including reasoning.

It does not report cached tokens.
"""

from __future__ import annotations

from gateway.providers.usage.base import RawUsage, bounded_usage
from gateway.types import Usage


def matches(raw: RawUsage) -> bool:
    """By the names of Ollama's own API; its OpenAI-compatible API uses OpenAI's."""
    return raw.prompt_eval_count is not None or raw.eval_count is not None


def normalize(raw: RawUsage) -> Usage:
    """Not `exact` without a count of the prompt."""
    # Without this count, Ollama did not evaluate the prompt, and its length is unknown.
    has_prompt = raw.prompt_eval_count is not None
    return bounded_usage(prompt=raw.prompt_eval_count or 0, output=raw.eval_count or 0, agree=has_prompt)
