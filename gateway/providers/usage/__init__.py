"""The family of dialects in which servers count tokens. `usage_of` turns any of them into buckets.

Which dialect counts are in is told by the names that they have; no server mixes them.
"""

from __future__ import annotations

from gateway.providers.usage import anthropic, ollama, openai
from gateway.providers.usage.base import Counts, Dialect
from gateway.types import Usage

DIALECTS: tuple[Dialect, ...] = (ollama, openai, anthropic)  # the first that knows the names


def usage_of(counts: Counts) -> Usage | None:
    """Buckets that do not overlap; None where nothing was counted. Counts that contradict each other are brought into
    bounds, and not called exact.
    """
    for dialect in DIALECTS:
        if dialect.spoken_in(counts):
            return dialect.usage_of(counts)
    return None


__all__ = ["DIALECTS", "Counts", "Dialect", "usage_of"]
