"""Anthropic's counts: input without what the cache read or wrote, each counted by itself.

A stream counts its input in `message_start` and its output, cumulatively, in `message_delta`. What the cache wrote is
told once more by how long it is kept, five minutes or an hour, which have prices of their own.
"""

from __future__ import annotations

from gateway.providers.usage.base import CacheCreation, OutputDetails, RawUsage, bounded_usage
from gateway.types import Usage


def matches(counts: RawUsage) -> bool:
    return counts.input_tokens is not None or counts.output_tokens is not None


def normalize(counts: RawUsage) -> Usage:
    uncached, cache_read = counts.input_tokens or 0, counts.cache_read_input_tokens or 0
    kept = counts.cache_creation or CacheCreation()
    for_minutes, for_an_hour = kept.ephemeral_5m_input_tokens or 0, kept.ephemeral_1h_input_tokens or 0
    cache_write = counts.cache_creation_input_tokens
    if cache_write is None:
        cache_write = for_minutes + for_an_hour
    thinking = (counts.output_tokens_details or OutputDetails()).thinking_tokens or 0
    return bounded_usage(
        prompt=uncached + cache_read + cache_write,
        output=counts.output_tokens or 0,
        cache_read=cache_read,
        cache_write=cache_write,
        reasoning=thinking,
        cache_write_1h=for_an_hour,
        agree=uncached >= 0 and (counts.cache_creation is None or cache_write == for_minutes + for_an_hour),
    )
