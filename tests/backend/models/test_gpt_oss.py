"""gpt-oss as published, with experts in MXFP4. Parity for transformers' layout is in test_parity.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import UnsupportedModel
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.models.config import ModelConfig
from backend.native import library
from backend.quantization import none as unquantised
from backend.quantization.mxfp4 import Mxfp4Linear
from tests.backend.checkpoints import random_mxfp4, save_gpt_oss_in_mxfp4


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    torch.manual_seed(0)
    blocks, scales = random_mxfp4(3, 10, 4)
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [E, ins, outs]
        assert torch.equal(
            Mxfp4Tensor.from_adjacent_pairs(blocks, scales).to(blocks.device, dtype).dequantize(),
            theirs.transpose(1, 2),
        )


@pytest.mark.parametrize("scale", [1, 127, 250])
def test_a_group_shares_a_power_of_two(scale: int) -> None:
    blocks = torch.full((1, 16), 0xF2, dtype=torch.uint8)
    numbers = Mxfp4Tensor.from_adjacent_pairs(blocks, torch.tensor([scale], dtype=torch.uint8)).dequantize()
    assert numbers.tolist() == [2.0 ** (scale - 127), -6 * 2.0 ** (scale - 127)] * 16


def first_tokens(directory: Path) -> list[int]:
    engine = Engine.load(EngineConfig(model_dir=directory, num_blocks=8, num_threads=1, dtype="float32"))
    request = Request("r", [3, 4, 5] * 9, SamplingParams(max_tokens=12, temperature=0.0))
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return request.token_ids


def test_a_published_checkpoint_equals_its_dequantized_model(tmp_path: Path) -> None:
    plain, published = tmp_path / "plain", tmp_path / "published"
    save_gpt_oss_in_mxfp4(plain, published)
    assert first_tokens(published) == first_tokens(plain)


@pytest.mark.skipif(library.load() is None, reason="there is no compiler here")
@pytest.mark.parametrize(("quantization", "are_kept"), [("none", True), ("int8", False)])
def test_experts_stay_in_four_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, are_kept: bool
) -> None:
    """Unless `--quantization` selects another format."""
    made: list[Mxfp4Linear] = []

    def make(*args: Any) -> Mxfp4Linear:
        made.append(Mxfp4Linear(*args))
        return made[-1]

    monkeypatch.setattr(unquantised, "Mxfp4Linear", make)
    save_gpt_oss_in_mxfp4(tmp_path / "plain", tmp_path / "published")
    config = EngineConfig(model_dir=tmp_path / "published", num_blocks=8, num_threads=1, quantization=quantization)
    layers = Engine.load(config).config.model.layers
    num_weights = sum(2 * layer.experts.num_experts for layer in layers if layer.experts)
    assert len(made) == (num_weights if are_kept else 0)


def test_other_architectures_in_mxfp4_are_rejected(checkpoint_dir: Callable[[str], Path]) -> None:
    raw = json.loads((checkpoint_dir("mixtral") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        ModelConfig.parse(raw | {"quantization_config": {"quant_method": "mxfp4"}})


def test_an_unpublished_swiglu_limit_is_rejected(checkpoint_dir: Callable[[str], Path]) -> None:
    raw = json.loads((checkpoint_dir("gpt-oss") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=r"swiglu_limit 6.0 is not supported, only 7.0"):
        ModelConfig.parse(raw | {"swiglu_limit": 6.0})
