"""Reads Ollama's token counts: the prompt, and the output including reasoning, at the top level of the body.

Ollama does not report cached tokens.
"""

from __future__ import annotations

from gateway.providers.usage.base import RawUsage, ReportedUsage


def matches(raw: RawUsage) -> bool:
    """Whether the counts have the names of Ollama's own API. Ollama's OpenAI-compatible API uses OpenAI's names."""
    return raw.prompt_eval_count is not None or raw.eval_count is not None


def read(raw: RawUsage) -> ReportedUsage:
    """Say what the counts mean. They do not `agree` if the prompt's count is missing."""
    # If the count is missing, Ollama did not evaluate the prompt, and the prompt's length is unknown.
    has_prompt = raw.prompt_eval_count is not None
    return ReportedUsage(prompt=raw.prompt_eval_count or 0, output=raw.eval_count or 0, agree=has_prompt)
