"""How model families count media: the vendors' published examples, bounds, and what the policy can change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.policy.media import Media
from gateway.policy.media_formulas import DEFAULT, FAMILIES, ITEM_TOKENS_MAX, MediaFormula, formula_for
from gateway.prompts.media.counting import IMAGE_TOKENS_BOUND
from tests.gateway.calls import a_policy

FORMULAS = [DEFAULT, *(formula for _, formula in FAMILIES)]


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        # OpenAI's guide to images
        ("gpt-4o", (1024, 1024), "high", 765),
        ("gpt-4o-2024-11-20", (2048, 4096), "", 1105),
        ("gpt-4o", (4096, 8192), "low", 85),
        ("chatgpt-4o-latest", (512, 512), "auto", 255),
        ("openai/gpt-4o-mini", (1024, 1024), "high", 25_501),
        ("gpt-5", (1024, 1024), "high", 630),
        ("o3", (1024, 1024), "", 675),
        ("gpt-4.1", (1024, 1024), "", 765),
        ("gpt-4.1-mini", (1024, 1024), "", 1659),  # 1,024 patches * 1.62
        ("gpt-4.1-mini", (1800, 2400), "", 2353),  # scaled down to 33 * 44 patches
        ("o4-mini", (1800, 2400), "", 2498),
        ("gpt-4.1-nano", (32, 33), "", 5),
        # as users measured it
        ("gpt-4.1", (2050, 513), "", 765),
        ("gpt-4.1", (2049, 513), "", 1445),
        ("gpt-5-mini", (1280, 720), "", 1104),
        ("gpt-5-mini", (2048, 768), "", 1844),
        # Anthropic's guide: 28 * 28 pixels, at most 1,568 pixels per side
        ("claude-sonnet-4-5-20250929", (200, 200), "", 64),
        ("claude-sonnet-4-5-20250929", (1000, 1000), "", 1296),
        ("us.anthropic.claude-3-5-sonnet-v2", (1092, 1092), "", 1521),
        ("claude-opus-4-7", (2000, 1500), "", 72 * 54),
        # Google's guide
        ("models/gemini-2.5-flash", (384, 384), "", 258),
        ("gemini-2.0-flash", (960, 540), "", 6 * 258),
        ("gemini-3-pro", (4000, 3000), "", 1120),
        # `smart_resize` of Qwen's preprocessor
        ("Qwen/Qwen2.5-VL-7B-Instruct", (1024, 1024), "", 37 * 37),
        ("Qwen2-VL-72B", (224, 224), "", 64),
        ("qwen2-vl", (1, 1), "", 4),
        ("qwen3-vl-8b", (1024, 1024), "", 1024),
        ("pixtral-12b-2409", (1024, 1024), "", 64 * 64 + 64),
        ("an-unknown-model", (280, 280), "", 100),
    ],
)  # fmt: skip
def test_the_tokens_of_an_image(model: str, size: tuple[int, int], detail: str, tokens: int) -> None:
    assert formula_for(model, "openai").image_tokens(*size, detail) == tokens


def test_larger_images_are_scaled_down() -> None:
    for model, most in {"claude-3-opus": 1568, "claude-opus-4-8": 4784, "qwen2.5-vl": 16_384, "gpt-5.4": 2500}.items():
        tokens = formula_for(model, "openai").image_tokens(8000, 6000, "")
        assert 0.9 * most < tokens <= most
    assert formula_for("gpt-5.4", "openai").image_tokens(6000, 4000, "original") > 9_000


def test_the_tokens_of_recordings_and_pages() -> None:
    gemini, qwen = formula_for("gemini-2.5-pro", "openai"), formula_for("Qwen2.5-Omni-7B", "vllm")
    assert gemini.audio_tokens(60) == 1_920
    assert gemini.page_tokens(7) == 7 * 258
    assert formula_for("gpt-4o-audio-preview", "openai").audio_tokens(60) == 600
    assert qwen.video_tokens(10) == 3_000
    assert qwen.video_tokens(3_600) == 12_288


def test_media_of_unknown_size_count_as_the_family_states() -> None:
    for formula in FORMULAS:
        assert formula.image_tokens(0, 0, "") == formula.unknown_image
        assert formula.audio_tokens(0) == formula.audio_tokens(formula.unknown_seconds)
        assert formula.video_tokens(0) == formula.video_tokens(formula.unknown_seconds)
        assert formula.page_tokens(0) == formula.page_tokens(formula.unknown_pages)


def test_a_provider_tells_the_family_of_models_with_other_names() -> None:
    assert formula_for("prod-vision", "anthropic") == formula_for("claude-3-haiku", "openai")
    assert formula_for("prod-vision", "openai") == DEFAULT


@given(
    st.sampled_from(FORMULAS),
    st.integers(1, 2**32),
    st.integers(1, 2**32),
    st.sampled_from(["", "low", "high", "original"]),
)
def test_no_image_counts_beyond_the_bound(formula: MediaFormula, width: int, height: int, detail: str) -> None:
    """Headers may claim any size."""
    assert 1 <= formula.image_tokens(width, height, detail) <= IMAGE_TOKENS_BOUND


@given(st.sampled_from(FORMULAS), st.floats(0, 1e9), st.integers(0, 10**9))
def test_no_recording_and_no_file_counts_beyond_the_bound(formula: MediaFormula, seconds: float, pages: int) -> None:
    for tokens in (formula.audio_tokens(seconds), formula.video_tokens(seconds), formula.page_tokens(pages)):
        assert 1 <= tokens <= ITEM_TOKENS_MAX


def test_the_policy_changes_single_values() -> None:
    family = formula_for("qwen2.5-vl", "vllm")
    limited = Media(patch_pixels=28, max_image_tokens=1280, page_tokens=900).formula("qwen2.5-vl", "vllm")
    assert limited.image_tokens(4000, 3000, "") <= 1280
    assert (limited.page, limited.unknown_image) == (900, family.unknown_image)
    assert Media(like="gpt-4o").formula("prod", "vllm") == formula_for("gpt-4o", "openai")


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({"like": "gpt4o"}, "no known model's name matches 'gpt4o'; known are 4o-mini"),
        ({"max_image_tokens": 5}, "need patch_pixels"),
        ({"patch_pixels": 28, "min_image_tokens": 9, "max_image_tokens": 5}, r"min_image_tokens \(9\) must be at most"),
        ({"audio_tokens_per_second": 0}, "audio_tokens_per_second"),
        ({"tokens": 1}, "tokens"),
    ],
)
def test_a_contradictory_policy_is_refused(media: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Media.model_validate(media)


def test_a_deployments_own_media_come_before_its_models() -> None:
    policy = a_policy(
        deployments=[
            {"name": "a", "base_url": "http://a.invalid/v1", "model": "gpt-4o"},
            {"name": "b", "base_url": "http://b.invalid/v1", "model": "gpt-4o", "media": {"like": "gemini-3"}},
        ],
        models=[
            {"name": "plain", "deployments": ["a"]},
            {"name": "m", "deployments": ["a", "b"], "media": {"like": "claude"}},
        ],
    )
    assert policy.media_formulas == {
        "plain": (formula_for("gpt-4o", "openai"),),
        "m": (formula_for("claude", "openai"), formula_for("gemini-3", "openai")),
    }
