"""Counts as they come, in whatever dialect, and the check that every dialect's buckets pass."""

from __future__ import annotations

from typing import Protocol

import msgspec

from gateway.types import Usage


class InputDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None
    thinking_tokens: int | None = None
    audio_tokens: int | None = None


class CacheCreation(msgspec.Struct):
    ephemeral_5m_input_tokens: int | None = None
    ephemeral_1h_input_tokens: int | None = None


class RawUsage(msgspec.Struct):
    """A `usage` object; and of Ollama's answers, which have none, the counts that stand in the answer itself."""

    # OpenAI: chat, completions, embeddings
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: InputDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    cached_tokens: int | None = None  # Moonshot's, which has no details
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's
    # OpenAI: responses. Anthropic
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: InputDetails | None = None
    output_tokens_details: OutputDetails | None = None
    # Anthropic
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation: CacheCreation | None = None
    service_tier: str | None = None
    # Ollama
    prompt_eval_count: int | None = None
    eval_count: int | None = None

    def updated(self, later: RawUsage) -> RawUsage:
        """With what `later` says anew: a stream may count its input at the beginning and its output at the end."""
        told = {name: value for name in self.__struct_fields__ if (value := getattr(later, name)) is not None}
        return msgspec.structs.replace(self, **told)


class Dialect(Protocol):
    """A module of this family."""

    def matches(self, counts: RawUsage) -> bool:
        """Whether the names are this dialect's."""

    def normalize(self, counts: RawUsage) -> Usage:
        """By `bounded_usage`."""


def bounded_usage(
    *,
    prompt: int,
    output: int,
    cache_read: int = 0,
    cache_write: int = 0,
    reasoning: int = 0,
    audio_input: int = 0,
    audio_output: int = 0,
    cache_write_1h: int = 0,
    agree: bool = True,
) -> Usage:
    """Buckets of a prompt and an output of which the others are parts. `agree`: what else is known fits, too."""
    if (
        agree
        and 0 <= cache_read <= prompt
        and output >= 0
        and not (cache_write or reasoning or audio_input or audio_output)
    ):
        return Usage(input_uncached=prompt - cache_read, cache_read=cache_read, output=output, exact=True)
    agree = (
        agree
        and min(prompt, output, cache_read, cache_write, reasoning, audio_input, audio_output, cache_write_1h) >= 0
        and cache_read + cache_write <= prompt
        and cache_write_1h <= cache_write
        and audio_input <= prompt
        and reasoning + audio_output <= output
    )
    prompt, output = max(prompt, 0), max(output, 0)
    cache_read = _within(cache_read, prompt)
    cache_write = _within(cache_write, prompt - cache_read)
    input_uncached = prompt - cache_read - cache_write
    reasoning = _within(reasoning, output)
    return Usage(
        input_uncached=input_uncached,
        cache_read=cache_read,
        cache_write=cache_write,
        output=output,
        reasoning=reasoning,
        audio_input=_within(audio_input, input_uncached),  # sound that was cached is priced as cached
        audio_output=_within(audio_output, output - reasoning),
        cache_write_1h=_within(cache_write_1h, cache_write),
        exact=agree,
    )


def _within(part: int, whole: int) -> int:
    return min(max(part, 0), whole)
