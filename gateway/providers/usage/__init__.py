"""The dialects in which servers report token counts: a family, which `normalize_usage` turns into one `Usage`.

The names of the counts show which dialect they are in. No server mixes dialects. Begin at `base`.
"""

from __future__ import annotations

from gateway.providers.usage import anthropic, ollama, openai
from gateway.providers.usage.base import Dialect, RawUsage
from gateway.types import Usage

DIALECTS: tuple[Dialect, ...] = (ollama, openai, anthropic)  # the first that matches is used


def normalize_usage(raw: RawUsage) -> Usage | None:
    """The counts as buckets that do not overlap. None if nothing was counted.

    Counts that contradict each other are clipped to what is possible, and the result is not `exact`.
    """
    for dialect in DIALECTS:
        if dialect.matches(raw):
            return dialect.normalize(raw)
    return None


__all__ = ["DIALECTS", "Dialect", "RawUsage", "normalize_usage"]
