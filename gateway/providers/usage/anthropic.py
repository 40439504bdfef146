"""Reads Anthropic's token counts, whose input excludes cached tokens. Cache reads and writes are counted separately.

A stream reports its input tokens in `message_start`, and its cumulative output tokens in `message_delta`.
`cache_creation` splits the cache writes into those kept for five minutes and those kept for an hour, because their
prices differ.
"""

from __future__ import annotations

from gateway.providers.usage.base import CacheCreation, OutputDetails, RawUsage, ReportedUsage, units_of


def matches(raw: RawUsage) -> bool:
    """Whether the counts are Anthropic's. Tried after OpenAI's format, because that may also have `input_tokens`."""
    return raw.input_tokens is not None or raw.output_tokens is not None


def read(raw: RawUsage) -> ReportedUsage:
    """Say what the counts mean. The prompt is the sum of uncached input, cache reads and cache writes."""
    uncached, cache_read = raw.input_tokens or 0, raw.cache_read_input_tokens or 0
    creation = raw.cache_creation or CacheCreation()
    for_minutes, for_an_hour = creation.ephemeral_5m_input_tokens or 0, creation.ephemeral_1h_input_tokens or 0
    cache_write = raw.cache_creation_input_tokens
    if cache_write is None:
        cache_write = for_minutes + for_an_hour
    thinking = (raw.output_tokens_details or OutputDetails()).thinking_tokens or 0
    return ReportedUsage(
        prompt=uncached + cache_read + cache_write,
        output=raw.output_tokens or 0,
        cache_read=cache_read,
        cache_write=cache_write,
        reasoning=thinking,
        cache_write_1h=for_an_hour,
        units=units_of(raw),
        agree=raw.cache_creation is None or cache_write == for_minutes + for_an_hour,
    )
