"""Reads OpenAI's token counts, which most servers use, including vLLM, SGLang and llama.cpp.

Totals include the parts that their details list. Chats, completions and embeddings have `prompt_tokens` and
`completion_tokens`. Responses have `input_tokens` and `output_tokens`. An embedding has no output. A chat that was
translated from Anthropic's Messages API also has `cache_creation`.
"""

from __future__ import annotations

from gateway.providers.usage.base import CacheCreation, InputDetails, OutputDetails, RawUsage, ReportedUsage, units_of

_NO_INPUT_DETAILS, _NO_OUTPUT_DETAILS, _NO_CREATION = InputDetails(), OutputDetails(), CacheCreation()


def matches(raw: RawUsage) -> bool:
    """Whether the counts have OpenAI's names.

    Chats, completions and embeddings have their own names. Responses have `input_tokens` with a total or details.
    """
    # Anthropic's counts also have `input_tokens`, but neither a total nor details.
    is_response = raw.total_tokens is not None or raw.input_tokens_details is not None
    return (
        raw.prompt_tokens is not None
        or raw.completion_tokens is not None
        or (raw.input_tokens is not None and is_response)
    )


def read(raw: RawUsage) -> ReportedUsage:
    """Say what the counts mean. Adds reasoning to the output if the total shows that the server omitted it.

    What the total contains beyond that is the `remainder`.
    """
    if raw.input_tokens is None or raw.prompt_tokens is not None:
        prompt, output = raw.prompt_tokens or 0, raw.completion_tokens or 0
        input_details, output_details = raw.prompt_tokens_details, raw.completion_tokens_details
    else:
        prompt, output = raw.input_tokens, raw.output_tokens or 0
        input_details, output_details = raw.input_tokens_details, raw.output_tokens_details
    input_details, output_details = input_details or _NO_INPUT_DETAILS, output_details or _NO_OUTPUT_DETAILS
    reasoning, total = output_details.reasoning_tokens or raw.reasoning_tokens or 0, raw.total_tokens
    cache_read = input_details.cached_tokens or raw.cached_tokens or raw.prompt_cache_hit_tokens
    cache_write = input_details.cache_writes
    if raw.prompt_tokens is not None:  # LiteLLM has Anthropic's names beside OpenAI's, and its prompt includes both
        cache_read = cache_read or raw.cache_read_input_tokens
        cache_write = cache_write or raw.cache_creation_input_tokens or 0
    agree, remainder = total in (None, prompt + output), 0
    if reasoning > 0 and total == prompt + output + reasoning:
        output += reasoning  # xAI and Gemini exclude reasoning from the output; only the total includes it
        agree = True
    elif total is not None and total > prompt + output:
        remainder = total - prompt - output  # Gemini's thinking, for example; billed as output, and named
        output += remainder
    return ReportedUsage(
        prompt=prompt,
        output=output,
        cache_read=cache_read or 0,
        cache_write=cache_write,
        reasoning=reasoning,
        audio_input=input_details.audio_tokens or 0,
        audio_output=output_details.audio_tokens or 0,
        cache_write_1h=(raw.cache_creation or _NO_CREATION).ephemeral_1h_input_tokens or 0,
        agree=agree,
        remainder=remainder,
        units=units_of(raw),
    )
