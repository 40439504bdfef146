"""Ollama's own counts, which stand in the answer itself: the whole prompt, and the whole output with its thinking.

What its cache held is not told apart.
"""

from __future__ import annotations

from gateway.providers.usage.base import RawUsage, bounded_usage
from gateway.types import Usage


def matches(counts: RawUsage) -> bool:
    return counts.prompt_eval_count is not None or counts.eval_count is not None


def normalize(counts: RawUsage) -> Usage:
    # Without a count of the prompt it was not evaluated anew, and how long it is stays unknown.
    told = counts.prompt_eval_count is not None
    return bounded_usage(prompt=counts.prompt_eval_count or 0, output=counts.eval_count or 0, agree=told)
