"""Anthropic's counts: input without what the cache read or wrote, each counted by itself.

A stream counts its input in `message_start` and its output, cumulatively, in `message_delta`.
"""

from __future__ import annotations

from gateway.counts.base import Counts, OutputDetails, in_bounds
from gateway.types import Usage


def spoken_in(counts: Counts) -> bool:
    return counts.input_tokens is not None or counts.output_tokens is not None


def usage_of(counts: Counts) -> Usage:
    buckets = (
        counts.input_tokens or 0,
        counts.cache_read_input_tokens or 0,
        counts.cache_creation_input_tokens or 0,
    )
    thinking = (counts.output_tokens_details or OutputDetails()).thinking_tokens or 0
    return in_bounds(
        prompt=sum(buckets),
        output=counts.output_tokens or 0,
        cache_read=buckets[1],
        cache_write=buckets[2],
        reasoning=thinking,
        agree=buckets[0] >= 0,
    )
