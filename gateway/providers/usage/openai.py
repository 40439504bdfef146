"""OpenAI's counts, which vLLM, SGLang, llama.cpp and most others speak: totals, and details that are parts of them.

Chat, completions and embeddings say prompt and completion, and responses say input and output. An embedding has no
output. A chat that was translated from Anthropic's Messages tells besides how long the cache keeps what it wrote.
"""

from __future__ import annotations

from gateway.providers.usage.base import CacheCreation, InputDetails, OutputDetails, RawUsage, bounded_usage
from gateway.types import Usage

_NO_INPUT_DETAILS, _NO_OUTPUT_DETAILS, _NO_CREATION = InputDetails(), OutputDetails(), CacheCreation()


def matches(counts: RawUsage) -> bool:
    of_a_response = counts.total_tokens is not None or counts.input_tokens_details is not None
    return (
        counts.prompt_tokens is not None
        or counts.completion_tokens is not None
        or (counts.input_tokens is not None and of_a_response)
    )


def normalize(counts: RawUsage) -> Usage:
    if counts.input_tokens is None or counts.prompt_tokens is not None:
        prompt, output = counts.prompt_tokens or 0, counts.completion_tokens or 0
        of_input, of_output = counts.prompt_tokens_details, counts.completion_tokens_details
    else:
        prompt, output = counts.input_tokens, counts.output_tokens or 0
        of_input, of_output = counts.input_tokens_details, counts.output_tokens_details
    of_input, of_output = of_input or _NO_INPUT_DETAILS, of_output or _NO_OUTPUT_DETAILS
    reasoning, total = of_output.reasoning_tokens or 0, counts.total_tokens
    agree = total in (None, prompt + output)
    if reasoning > 0 and total == prompt + output + reasoning:
        output += reasoning  # some servers (xAI, Gemini) count thinking beside the answer; only the total tells
        agree = True
    elif total is not None and total > prompt + output and of_output is _NO_OUTPUT_DETAILS:
        reasoning = total - prompt - output  # or tell of it in the total alone: what else it may be, nobody knows
        output += reasoning
    return bounded_usage(
        prompt=prompt,
        output=output,
        cache_read=of_input.cached_tokens or counts.cached_tokens or counts.prompt_cache_hit_tokens or 0,
        cache_write=of_input.cache_write_tokens or 0,
        reasoning=reasoning,
        audio_input=of_input.audio_tokens or 0,
        audio_output=of_output.audio_tokens or 0,
        cache_write_1h=(counts.cache_creation or _NO_CREATION).ephemeral_1h_input_tokens or 0,
        agree=agree,
    )
