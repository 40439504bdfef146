"""Quantized checkpoints give the tokens of the plain checkpoint with the same values. They are packed here, number by
number, from the formats' descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import UnsupportedModel, WeightsError
from backend.model_files import open_model_files
from backend.models.config import ModelConfig
from tests.backend.checkpoints import build_model, save
from tests.backend.models.test_parity import PROMPTS, greedy

GROUP = 32
FP8 = torch.float8_e4m3fn
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a quantized weight by the last part of their names, and the plain weight [out, in]."""


def pack(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packs numbers along the last dimension into words, the first one into the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        words |= numbers[..., (order[i] if order else i) :: per_word].long() << (bits * i)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


def grouped(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random numbers, scales in half precision and zero points, for groups of inputs of a weight [out, in]."""
    outs, ins = weight.shape
    scales = (torch.rand(outs, ins // GROUP) * 0.1 + 0.05).half()
    zeros = torch.randint(1, 2**bits, (outs, ins // GROUP))
    return torch.randint(0, 2**bits, (outs, ins)), scales, zeros


def spread(values: Tensor) -> Tensor:
    return values.repeat_interleave(GROUP, 1)


def gptq(weight: Tensor, bits: int = 4, act_order: bool = False, version: int = 1) -> Packed:
    numbers, scales, zeros = grouped(weight, bits)
    stored_zeros = zeros - 1 if version == 1 else zeros
    groups = torch.arange(weight.shape[1]) // GROUP
    if act_order:
        groups = groups[torch.randperm(len(groups))]
    plain = (numbers - zeros[:, groups]) * scales.float()[:, groups]
    tensors = {
        "qweight": pack(numbers, bits).t().contiguous(),
        "qzeros": pack(stored_zeros.t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    return tensors, plain


def awq(weight: Tensor) -> Packed:
    numbers, scales, zeros = grouped(weight, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": pack(numbers.t(), 4, order),
        "qzeros": pack(zeros.t(), 4, order),
        "scales": scales.t().contiguous(),
    }
    return tensors, (numbers - spread(zeros)) * spread(scales.float())


def compressed_int4(weight: Tensor, asymmetric: bool = False) -> Packed:
    numbers, scales, zeros = grouped(weight, 4)
    tensors = {
        "weight_packed": pack(numbers, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if asymmetric:
        tensors["weight_zero_point"] = pack(zeros.t(), 4).t().contiguous()
    return tensors, (numbers - (spread(zeros) if asymmetric else 8)) * spread(scales.float())


def scaled(weight: Tensor, scale: Tensor, name: str = "weight_scale", dtype: torch.dtype = FP8) -> Packed:
    """A weight in FP8 or int8 times a scale that broadcasts."""
    values = (weight / scale).clamp(-120, 120).to(dtype)
    return {"weight": values, name: scale, "input_scale": torch.ones(1)}, values.float() * scale


def blocks(weight: Tensor) -> Packed:
    rows, columns = (-(-length // 48) for length in weight.shape)
    scale = torch.rand(rows, columns) * 0.01 + 0.01
    full = scale.repeat_interleave(48, 0)[: weight.shape[0]].repeat_interleave(48, 1)[:, : weight.shape[1]]
    values = (weight / full).to(FP8)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * full


def per_output(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 120


FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, 8)),
    "gptq by activations": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda w: gptq(w, act_order=True)),
    "gptq of version 2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, version=2),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "compressed int4": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
        compressed_int4,
    ),
    "compressed int4 with zero points": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
        lambda w: compressed_int4(w, asymmetric=True),
    ),
    "compressed fp8": ({"quant_method": "compressed-tensors"}, lambda w: scaled(w, per_output(w))),
    "compressed int8": (
        {"quant_method": "compressed-tensors"},
        lambda w: scaled(w, per_output(w), dtype=torch.int8),
    ),
    "fp8 per tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: scaled(w, w.abs().max() / 120)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda w: scaled(w, per_output(w))),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, blocks),
}


def convert(directory: Path, plain: Path, form: str) -> None:
    """Packs the weights of a checkpoint, and writes what they stand for to the checkpoint `plain`."""
    torch.manual_seed(7)
    quantization, quantize = FORMS[form]
    tensors = load_file(directory / "model.safetensors")
    stored = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            parts, tensors[name] = quantize(weight)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    model = build_model("llama")
    return save(model, tmp_path / "stored"), save(model, tmp_path / "plain")


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_and_tokens_are_those_of_the_plain_checkpoint(pair: tuple[Path, Path], form: str) -> None:
    stored, plain = pair
    convert(stored, plain, form)
    with open_model_files(stored).tensors() as ours, open_model_files(plain).tensors() as expected:
        assert ours.keys() == expected.keys()
        for name in ours:
            torch.testing.assert_close(ours[name](), expected[name](), rtol=1e-6, atol=1e-7)
    assert open_model_files(stored).weights_bytes(torch.bfloat16) == open_model_files(plain).weights_bytes(
        torch.bfloat16
    )
    prompts = {"short": PROMPTS["short"]}
    first, second = (
        greedy(Engine.load(EngineConfig(model_dir=each, num_blocks=16, num_threads=1)), prompts) for each in pair
    )
    assert [token.token_id for token in first["short"]] == [token.token_id for token in second["short"]]


def test_deepseek_as_published_in_fp8(tmp_path: Path) -> None:
    """Every projection is in blocks, some of them cut off. Routers and their biases are not quantized."""
    pair = [save(build_model("deepseek-v3"), tmp_path / name) for name in ("stored", "plain")]
    convert(pair[0], pair[1], "fp8 in blocks")
    first, second = (
        greedy(Engine.load(EngineConfig(model_dir=each, num_blocks=16, num_threads=1)), {"p": PROMPTS["short"]})
        for each in pair
    )
    assert [token.token_id for token in first["p"]] == [token.token_id for token in second["p"]]


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    ],
)
def test_what_cannot_be_read_is_named(pair: tuple[Path, Path], quantization: dict[str, Any], named: str) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    (pair[0] / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.load(pair[0])


def test_a_missing_part_of_a_weight_is_named(pair: tuple[Path, Path]) -> None:
    convert(*pair, "awq")
    tensors = load_file(pair[0] / "model.safetensors")
    missing = "model.layers.1.mlp.up_proj.scales"
    del tensors[missing]
    save_file(tensors, pair[0] / "model.safetensors")
    with pytest.raises(WeightsError, match=missing):
        Engine.load(EngineConfig(model_dir=pair[0], num_blocks=16, num_threads=1))
