"""Interface of a usage format: must recognise a server's token counts and say what they count.

`RawUsage` has the fields of all formats. The module of a format recognises its own fields (`matches`) and says what
they mean (`read`). The result is a `ReportedUsage`: the same numbers for every format, as the server sent them. It
converts itself to buckets that do not overlap (`usage`), and finds counts that contradict each other
(`contradiction`). Whether the counts are possible for one call is checked in `gateway.billing.usage_bounds`.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from gateway.types import Usage

COUNT_MAX = 2**53 - 1
"""The largest count that is read: JSON numbers above it are not exact, and sums of a few such counts fit 64 bits."""

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
"""A token count in a server's reply. Negative and larger numbers are malformed."""


class InputDetails(msgspec.Struct):
    """OpenAI's `prompt_tokens_details` or `input_tokens_details`: parts of the prompt's tokens."""

    cached_tokens: TokenCount | None = None
    cache_write_tokens: TokenCount | None = None
    audio_tokens: TokenCount | None = None
    created_cache_tokens: TokenCount | None = None  # vLLM
    cache_creation_input_tokens: TokenCount | None = None  # DashScope
    cache_creation_tokens: TokenCount | None = None  # LiteLLM

    @property
    def cache_writes(self) -> int:
        """Tokens written to a cache, by the name that the server uses."""
        return (
            self.cache_write_tokens
            or self.created_cache_tokens
            or self.cache_creation_input_tokens
            or self.cache_creation_tokens
            or 0
        )


class OutputDetails(msgspec.Struct):
    """OpenAI's `completion_tokens_details` or `output_tokens_details`: parts of the output's tokens."""

    reasoning_tokens: TokenCount | None = None
    thinking_tokens: TokenCount | None = None
    audio_tokens: TokenCount | None = None


class CacheCreation(msgspec.Struct):
    """Anthropic's `cache_creation`: cache writes by lifetime of the entry. Each lifetime has its own price."""

    ephemeral_5m_input_tokens: TokenCount | None = None
    ephemeral_1h_input_tokens: TokenCount | None = None


class ServerTools(msgspec.Struct):
    """Anthropic's `server_tool_use`: calls of tools that the server ran."""

    web_search_requests: TokenCount | None = None
    web_fetch_requests: TokenCount | None = None


class RawUsage(msgspec.Struct):
    """The `usage` object that a server sent, in any format. For Ollama, the counts at the top level of the body."""

    # OpenAI: chat, completions, embeddings
    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None
    prompt_tokens_details: InputDetails | None = None
    completion_tokens_details: OutputDetails | None = None
    cached_tokens: TokenCount | None = None  # Moonshot, which sends no details
    prompt_cache_hit_tokens: TokenCount | None = None  # DeepSeek
    reasoning_tokens: TokenCount | None = None  # SGLang: part of the completion
    # OpenAI: responses; Anthropic
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    input_tokens_details: InputDetails | None = None
    output_tokens_details: OutputDetails | None = None
    # Anthropic
    cache_creation_input_tokens: TokenCount | None = None
    cache_read_input_tokens: TokenCount | None = None
    cache_creation: CacheCreation | None = None
    service_tier: str | None = None
    # What is not counted in tokens
    server_tool_use: ServerTools | None = None
    num_search_queries: TokenCount | None = None  # Perplexity
    num_sources_used: TokenCount | None = None  # xAI, which bills sources of a search
    num_images: TokenCount | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None  # transcriptions, `type: duration`
    # Ollama
    prompt_eval_count: TokenCount | None = None
    eval_count: TokenCount | None = None

    def updated(self, later: RawUsage) -> RawUsage:
        """Return these counts, each replaced by the count in `later` if `later` has it.

        A stream may report its input tokens at the beginning and its output tokens at the end.
        """
        changed = {name: value for name in self.__struct_fields__ if (value := getattr(later, name)) is not None}
        return msgspec.structs.replace(self, **changed)


def units_of(raw: RawUsage) -> tuple[tuple[str, int], ...]:
    """Return what is not counted in tokens, in thousandths of a unit, by the units of `gateway.policy.prices`."""
    if raw.server_tool_use is None and not (
        raw.num_images or raw.seconds or raw.num_search_queries or raw.num_sources_used
    ):
        return ()
    tools = raw.server_tool_use or ServerTools()
    counted = (
        ("image", raw.num_images or 0),
        ("second", raw.seconds or 0),
        ("search", (tools.web_search_requests or 0) + (raw.num_search_queries or 0) + (raw.num_sources_used or 0)),
        ("tool", tools.web_fetch_requests or 0),
    )
    return tuple((unit, round(count * 1_000)) for unit, count in counted if count)


class ReportedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's counts say, in tokens. The same for every format.

    `prompt` includes `cache_read`, `cache_write` and `audio_input`. `output` includes `reasoning`, `audio_output` and
    `remainder`, which is the part that only the total contains. `cache_write` includes `cache_write_1h`. `agree` is
    false if the reported total contradicts its counts.
    """

    prompt: int
    output: int
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0
    audio_input: int = 0
    audio_output: int = 0
    cache_write_1h: int = 0
    agree: bool = True
    remainder: int = 0
    units: tuple[tuple[str, int], ...] = ()

    def contradiction(self) -> str | None:
        """Say which parts are above their sum, as in `cached tokens 9 are above the prompt's 5`. None if none are."""
        if self.remainder and self.reasoning + self.audio_output + self.remainder > self.output:
            return f"the remainder {self.remainder} of the total is above the output's {self.output}"
        if not (self.cache_read or self.cache_write or self.reasoning or self.audio_input or self.audio_output):
            return None
        cached = self.cache_read + self.cache_write
        for part, name, whole, of in (
            (cached, "cached tokens", self.prompt, "the prompt's"),
            (self.cache_write_1h, "one-hour cache writes", self.cache_write, "all cache writes'"),
            (self.audio_input, "audio tokens", self.prompt, "the prompt's"),
            (self.reasoning + self.audio_output, "reasoning and audio tokens", self.output, "the output's"),
        ):
            if part > whole:
                return f"{name} {part} are above {of} {whole}"
        return None

    def usage(self) -> Usage:
        """Return buckets that do not overlap and add up to the prompt and the output.

        A part that exceeds its sum is clipped to the sum. The result is `exact` if nothing contradicts.
        """
        prompt, output, cache_read = self.prompt, self.output, self.cache_read
        if (
            self.agree
            and cache_read <= prompt
            and not (self.cache_write or self.reasoning or self.audio_input or self.audio_output or self.units)
        ):
            return Usage(prompt - cache_read, cache_read, output=output, exact=True)
        cache_read = min(cache_read, prompt)
        cache_write = min(self.cache_write, prompt - cache_read)
        input_uncached = prompt - cache_read - cache_write
        reasoning = min(self.reasoning, output)
        return Usage(
            input_uncached=input_uncached,
            cache_read=cache_read,
            cache_write=cache_write,
            output=output,
            reasoning=reasoning,
            audio_input=min(self.audio_input, input_uncached),  # cached audio is priced as cached
            audio_output=min(self.audio_output, output - reasoning),
            cache_write_1h=min(self.cache_write_1h, cache_write),
            remainder=min(self.remainder, output - reasoning),
            units=self.units,
            exact=self.agree and self.contradiction() is None,
        )


class Dialect(Protocol):
    """Interface that the module of each usage format implements."""

    def matches(self, raw: RawUsage) -> bool:
        """Whether the names of the counts are those of this format."""

    def read(self, raw: RawUsage) -> ReportedUsage:
        """Say what the counts mean."""
