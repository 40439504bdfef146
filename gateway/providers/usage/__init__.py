"""The family of dialects in which servers count tokens. `normalize_usage` turns any of them into buckets.

Which dialect counts are in is told by the names that they have; no server mixes them.
"""

from __future__ import annotations

from gateway.providers.usage import anthropic, ollama, openai
from gateway.providers.usage.base import Dialect, RawUsage
from gateway.types import Usage

DIALECTS: tuple[Dialect, ...] = (ollama, openai, anthropic)  # the first that knows the names


def normalize_usage(counts: RawUsage) -> Usage | None:
    """Buckets that do not overlap; None where nothing was counted. Counts that contradict each other are brought into
    bounds, and not called exact.
    """
    for dialect in DIALECTS:
        if dialect.matches(counts):
            return dialect.normalize(counts)
    return None


__all__ = ["DIALECTS", "Dialect", "RawUsage", "normalize_usage"]
