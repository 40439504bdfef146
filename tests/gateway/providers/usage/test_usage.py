"""Token counts of every dialect, in the form in which servers send them."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.usage import RawUsage, normalize_usage
from gateway.types import Usage


def read(counts: dict[str, Any]) -> Usage | None:
    return normalize_usage(msgspec.json.decode(orjson.dumps(counts), type=RawUsage))


OPENAI_CHAT = {
    "prompt_tokens": 1117, "completion_tokens": 46, "total_tokens": 1163,
    "prompt_tokens_details": {"cached_tokens": 1024, "cache_write_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 12, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    },
}  # fmt: skip
OPENAI_AUDIO = {
    "prompt_tokens": 120, "completion_tokens": 90, "total_tokens": 210,
    "prompt_tokens_details": {"cached_tokens": 0, "text_tokens": 20, "audio_tokens": 100, "image_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "text_tokens": 15, "audio_tokens": 75},
}  # fmt: skip
OPENAI_RESPONSES = {
    "input_tokens": 36, "input_tokens_details": {"cached_tokens": 30, "cache_write_tokens": 4},
    "output_tokens": 87, "output_tokens_details": {"reasoning_tokens": 64}, "total_tokens": 123,
}  # fmt: skip
VLLM = {"prompt_tokens": 10, "total_tokens": 14, "completion_tokens": 4, "prompt_tokens_details": None}
EMBEDDING = {"prompt_tokens": 8, "total_tokens": 8}
REASONING_APART = {  # xAI
    "prompt_tokens": 41, "completion_tokens": 104, "total_tokens": 495,
    "prompt_tokens_details": {"text_tokens": 41, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": 40},
    "completion_tokens_details": {"reasoning_tokens": 350, "audio_tokens": 0},
}  # fmt: skip
ANTHROPIC = {
    "input_tokens": 21, "cache_creation_input_tokens": 188_086, "cache_read_input_tokens": 1_000,
    "cache_creation": {"ephemeral_5m_input_tokens": 188_000, "ephemeral_1h_input_tokens": 86},
    "output_tokens": 393, "output_tokens_details": {"thinking_tokens": 100}, "service_tier": "standard",
}  # fmt: skip
MOONSHOT = {"prompt_tokens": 19, "completion_tokens": 21, "total_tokens": 40, "cached_tokens": 16}
DEEPSEEK = {
    "prompt_tokens": 71, "completion_tokens": 5, "total_tokens": 76, "prompt_cache_hit_tokens": 64,
    "prompt_cache_miss_tokens": 7,
}  # fmt: skip
OLLAMA = {"prompt_eval_count": 26, "eval_count": 298}


DIALECTS = {
    "openai": (OPENAI_CHAT, Usage(93, 1024, 0, 46, 12, exact=True)),
    "audio": (OPENAI_AUDIO, Usage(120, output=90, exact=True, audio_input=100, audio_output=75)),
    "responses": (OPENAI_RESPONSES, Usage(2, 30, 4, 87, 64, exact=True)),
    "vllm": (VLLM, Usage(10, output=4, exact=True)),
    "embedding": (EMBEDDING, Usage(8, exact=True)),
    "reasoning apart": (REASONING_APART, Usage(1, 40, 0, 454, 350, exact=True)),
    "anthropic": (ANTHROPIC, Usage(21, 1_000, 188_086, 393, 100, exact=True, cache_write_1h=86)),
    "moonshot": (MOONSHOT, Usage(3, 16, output=21, exact=True)),
    "deepseek": (DEEPSEEK, Usage(7, 64, output=5, exact=True)),
    "ollama": (OLLAMA, Usage(26, output=298, exact=True)),
    "vllm with cache writes": (
        {**VLLM, "prompt_tokens_details": {"cached_tokens": 2, "created_cache_tokens": 5}},
        Usage(3, 2, 5, output=4, exact=True),
    ),
    "sglang": ({**VLLM, "reasoning_tokens": 3}, Usage(10, output=4, reasoning=3, exact=True)),
    "dashscope": (
        {**VLLM, "prompt_tokens_details": {"cached_tokens": 1, "cache_creation_input_tokens": 6}},
        Usage(3, 1, 6, output=4, exact=True),
    ),
    "litellm": (
        {**VLLM, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 1},
        Usage(5, 4, 1, output=4, exact=True),
    ),
}


@pytest.mark.parametrize(("counts", "expected"), DIALECTS.values(), ids=DIALECTS)
def test_every_dialect_is_normalized_to_buckets(counts: dict[str, Any], expected: Usage) -> None:
    assert read(counts) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({**OPENAI_CHAT, "total_tokens": 1164}, 1164),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"audio_tokens": 6}}, 7),
        ({"prompt_tokens": 5, "completion_tokens": 2, "completion_tokens_details": {"audio_tokens": 3}}, 7),
        ({**OPENAI_RESPONSES, "output_tokens": 50}, 123),
        ({**ANTHROPIC, "cache_creation_input_tokens": 50}, 21 + 1_000 + 50 + 393),
        ({"eval_count": 7}, 7),  # Ollama did not evaluate the prompt, so its length is unknown
    ],
)
def test_counts_that_contradict_each_other_are_bounded_and_not_exact(counts: dict[str, Any], expected: int) -> None:
    usage = read(counts)
    assert usage is not None and not usage.exact and usage.total == expected


@pytest.mark.parametrize("counts", [{}, {"duration": 3}, {"total_tokens": 5}])
def test_a_body_without_counts_has_no_usage(counts: dict[str, Any]) -> None:
    assert read(counts) is None


def test_cached_audio_counts_as_cached() -> None:
    counts = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 90, "audio_tokens": 40}}
    assert read(counts) == Usage(10, 90, exact=True, audio_input=10)


def test_later_counts_replace_earlier_ones() -> None:
    first = RawUsage(input_tokens=21, cache_read_input_tokens=5, output_tokens=1)
    assert normalize_usage(first.updated(RawUsage(output_tokens=9))) == Usage(21, 5, output=9, exact=True)


number = st.none() | st.integers(0, 50)
details = st.none() | st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("cached_tokens", "cache_write_tokens", "audio_tokens", "reasoning_tokens"), number)
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **{name: number for name in RawUsage.__struct_fields__ if name.endswith(("_tokens", "_count"))},
            "cache_creation": st.none()
            | st.fixed_dictionaries(
                {}, optional=dict.fromkeys(("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"), number)
            ),
            **{name: details for name in RawUsage.__struct_fields__ if name.endswith("_details")},
        },
    )
)
def test_the_buckets_are_consistent_for_any_counts(counts: dict[str, Any]) -> None:
    usage = read(counts)
    if usage is None:
        return
    assert min(usage.input_uncached, usage.cache_read, usage.cache_write, usage.audio_input) >= 0
    assert usage.audio_input <= usage.input_uncached
    assert 0 <= usage.cache_write_1h <= usage.cache_write
    assert min(usage.output, usage.reasoning, usage.audio_output) >= 0
    assert usage.reasoning + usage.audio_output <= usage.output
    assert usage.total == usage.input_uncached + usage.cache_read + usage.cache_write + usage.output
