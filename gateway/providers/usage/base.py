"""Interface of a usage format: must recognise a server's token counts and convert them to buckets.

`RawUsage` has the fields of all formats. The module of a format recognises its own fields (`matches`) and computes
buckets from them (`normalize`). `bounded_usage` checks that the buckets of every format are plausible.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from gateway.types import Usage


class InputDetails(msgspec.Struct):
    """OpenAI's `prompt_tokens_details` or `input_tokens_details`: parts of the prompt's tokens."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    audio_tokens: int | None = None


class OutputDetails(msgspec.Struct):
    """OpenAI's `completion_tokens_details` or `output_tokens_details`: parts of the output's tokens."""

    reasoning_tokens: int | None = None
    thinking_tokens: int | None = None
    audio_tokens: int | None = None


class CacheCreation(msgspec.Struct):
    """Anthropic's `cache_creation`: cache writes by lifetime of the entry. Each lifetime has its own price."""

    ephemeral_5m_input_tokens: int | None = None
    ephemeral_1h_input_tokens: int | None = None


class RawUsage(msgspec.Struct):
    """The `usage` object that a server sent, in any format. For Ollama, the counts at the top level of the body."""

    # OpenAI: chat, completions, embeddings
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: InputDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    cached_tokens: int | None = None  # Moonshot, which sends no details
    prompt_cache_hit_tokens: int | None = None  # DeepSeek
    # OpenAI: responses; Anthropic
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
        """Return these counts, each replaced by the count in `later` if `later` has it.

        A stream may report its input tokens at the beginning and its output tokens at the end.
        """
        changed = {name: value for name in self.__struct_fields__ if (value := getattr(later, name)) is not None}
        return msgspec.structs.replace(self, **changed)


class Dialect(Protocol):
    """Interface that the module of each usage format implements."""

    def matches(self, raw: RawUsage) -> bool:
        """Whether the names of the counts are those of this format."""

    def normalize(self, raw: RawUsage) -> Usage:
        """Convert the counts to buckets with `bounded_usage`."""


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
    """Return buckets that do not overlap and add up to the prompt and the output. All numbers are tokens.

    `prompt` includes `cache_read`, `cache_write` and `audio_input`. `output` includes `reasoning` and `audio_output`.
    `cache_write` includes `cache_write_1h`. A part that exceeds its total is clipped to the total. The result is
    `exact` if nothing was clipped and the caller's own checks passed (`agree`).
    """
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
        audio_input=_within(audio_input, input_uncached),  # cached audio is priced as cached
        audio_output=_within(audio_output, output - reasoning),
        cache_write_1h=_within(cache_write_1h, cache_write),
        exact=agree,
    )


def _within(part: int, whole: int) -> int:
    return min(max(part, 0), whole)
