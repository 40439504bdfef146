"""The gateway predicts as many tokens for an image as the engine computes, so limits and budgets hold for both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backend.models.config import ModelConfig
from backend.models.qwen_vision import image_size
from gateway.policy.media_formulas import formula_for
from tests.backend.vision_models import build

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
SIZES = [(1, 1), (1, 199), (13, 13), (14, 14), (27, 29), (28, 28), (56, 56), (640, 480), (1920, 1080), (8000, 6000)]


def test_the_gateways_formula_is_the_engines_rule(tmp_path: Path) -> None:
    build(tmp_path)
    vision = ModelConfig.load(tmp_path).vision
    assert vision
    vision = replace(vision, min_pixels=3_136, max_pixels=12_845_056)  # the published preprocessor_config.json
    formula = formula_for(MODEL, "vllm")
    random = np.random.default_rng(3)
    sizes = [*SIZES, *random.integers(1, 300, (2000, 2)).tolist(), *random.integers(1, 8000, (2000, 2)).tolist()]
    differing = []
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            continue  # refused by the engine
        scaled = image_size(width, height, vision)
        tokens = scaled[0] * scaled[1] // vision.token_side**2
        if formula.image_tokens(width, height, "auto") != tokens:
            differing.append((width, height, tokens, formula.image_tokens(width, height, "auto")))
    assert differing == []


@pytest.mark.parametrize("detail", ["low", "high", "auto", ""])
def test_detail_changes_nothing(detail: str) -> None:
    formula = formula_for(MODEL, "vllm")
    assert formula.image_tokens(640, 480, detail) == formula.image_tokens(640, 480, "auto") == 23 * 17
