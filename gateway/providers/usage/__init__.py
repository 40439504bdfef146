"""Token usage: `read_usage` says what the token counts of each server's format mean, as one `ReportedUsage`.

The formats are OpenAI's, Anthropic's and Ollama's. The names of the counts show their format, and no server mixes two
formats. Begin at `base`.
"""

from __future__ import annotations

from gateway.providers.usage import anthropic, ollama, openai
from gateway.providers.usage.base import Dialect, RawUsage, ReportedUsage
from gateway.types import Usage

DIALECTS: tuple[Dialect, ...] = (ollama, openai, anthropic)  # the first format that matches is used


def read_usage(raw: RawUsage) -> ReportedUsage | None:
    """Say what token counts mean. Returns None if the server counted nothing."""
    for dialect in DIALECTS:
        if dialect.matches(raw):
            return dialect.read(raw)
    return None


def normalize_usage(raw: RawUsage) -> Usage | None:
    """Convert token counts to buckets that do not overlap. Returns None if the server counted nothing.

    Counts that contradict each other are clipped to consistent values, and the result is then not `exact`. For
    translations of a reply to another API format. Bills check more (`gateway.billing.usage_bounds`).
    """
    reported = read_usage(raw)
    return None if reported is None else reported.usage()


__all__ = ["DIALECTS", "Dialect", "RawUsage", "ReportedUsage", "normalize_usage", "read_usage"]
