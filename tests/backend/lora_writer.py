"""Random LoRA adapters in PEFT's format, and the same adapters merged into a transformers model: the oracle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ATTENTION = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
)  # fmt: skip
MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "lora_dropout": 0.1, "bias": "none",
    "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None, "inference_mode": True,
    "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}, "layers_pattern": None, "revision": None,
}  # fmt: skip


def modules_of(model: PreTrainedModel, kinds: Sequence[str]) -> list[str]:
    """The linear layers with these names, except experts that not all tokens use."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in kinds and ".experts." not in name
    ]


def rank_of(module: str, config: dict[str, Any]) -> int:
    return int(next((r for key, r in config["rank_pattern"].items() if module.endswith(f".{key}")), config["r"]))


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    seed: int,
    kinds: Sequence[str] = ATTENTION + MLP,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """An adapter that changes all layers of these kinds by about as much as they compute."""
    config = CONFIG | {"target_modules": sorted(kinds)} | changes
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in modules_of(model, kinds):
        layer: Any = model.get_submodule(name)
        rank = rank_of(name, config)
        for matrix, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = (
                torch.randn(shape, generator=random, dtype=torch.float32).mul_(0.15).to(dtype)
            )
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Adds an adapter's matrices to the model's weights, in their dtype: W + scale B A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name in {re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", key) for key in tensors}:
            a, b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
            alpha = next(
                (x for key, x in config["alpha_pattern"].items() if name.endswith(f".{key}")), config["lora_alpha"]
            )
            scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
            weight = model.get_parameter(f"{name}.weight")
            weight.add_(scale * (b.to(weight.dtype) @ a.to(weight.dtype)))
    return model
