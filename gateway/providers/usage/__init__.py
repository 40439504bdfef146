"""Token usage: `normalize_usage` converts the token counts of each server's format to one `Usage`.

The formats are OpenAI's, Anthropic's and Ollama's. The names of the counts show their format, and no server mixes two
formats. Begin at `base`.
"""

from __future__ import annotations

from gateway.providers.usage import anthropic, ollama, openai
from gateway.providers.usage.base import Dialect, RawUsage
from gateway.types import Usage

DIALECTS: tuple[Dialect, ...] = (ollama, openai, anthropic)  # the first format that matches is used


def normalize_usage(raw: RawUsage) -> Usage | None:
    """Convert token counts to buckets that do not overlap. Returns None if the server counted nothing.

    Counts that contradict each other are clipped to possible values, and the result is then not `exact`.
    """
    for dialect in DIALECTS:
        if dialect.matches(raw):
            return dialect.normalize(raw)
    return None


__all__ = ["DIALECTS", "Dialect", "RawUsage", "normalize_usage"]
