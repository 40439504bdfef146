"""Writes GGUF files as llama.cpp's converter does, from checkpoints in transformers' layout.

Names come from the `gguf` package. The conversion of each family is that of `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

Array = np.ndarray[Any, np.dtype[Any]]
Quantise = Callable[[str, Array], tuple[Array, GGMLQuantizationType]]
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2",
    "granite": "granite", "smollm3": "smollm3", "gpt_oss": "gpt-oss",
}  # fmt: skip
INTERLEAVED = {"llama", "granite", "smollm3"}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


# The float16 factors of a block's scales, and those of its minima: their offsets in a block, and typical sizes.
FACTORS = {
    GGMLQuantizationType.Q8_0: {0: 3e-4},
    GGMLQuantizationType.Q4_0: {0: 4e-3},
    GGMLQuantizationType.IQ4_NL: {0: 3e-4},
    GGMLQuantizationType.IQ4_XS: {0: 2e-5},
    GGMLQuantizationType.Q4_K: {0: 1.2e-4, 2: 9e-4},
    GGMLQuantizationType.Q5_K: {0: 6e-5, 2: 9e-4},
    GGMLQuantizationType.Q6_K: {208: 2e-5},
}


def random_blocks(kind: GGMLQuantizationType, outs: int, ins: int, seed: int = 0) -> Array:
    """A weight [outs, ins] of random numbers near 0.02 as [outs, bytes of a row], with every bit of a code in use."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (outs, ins // length, size), dtype=np.uint8)
    for at, scale in FACTORS[kind].items():
        factors = (rng.uniform(0.5, 1.5, (outs, ins // length, 1)) * scale).astype(np.float16)
        blocks[..., at : at + 2] = factors.view(np.uint8)
    return blocks.reshape(outs, -1)


def as_type(kind: GGMLQuantizationType) -> Quantise:
    """Writes matrices in this type, everything else in float32."""

    def quantise(name: str, values: Array) -> tuple[Array, GGMLQuantizationType]:
        if values.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name:
            return values, GGMLQuantizationType.F32
        if kind is GGMLQuantizationType.F16:
            return values.astype(np.float16), kind
        return gguf.quantize(values, kind), kind

    return quantise


def experts_in_mxfp4(others: GGMLQuantizationType) -> Quantise:
    """Writes experts in MXFP4, the format in which gpt-oss was trained and published."""
    in_mxfp4, otherwise = as_type(GGMLQuantizationType.MXFP4), as_type(others)
    return lambda name, values: (in_mxfp4 if "exps.weight" in name else otherwise)(name, values)


def write_gguf(
    directory: Path,
    path: Path,
    quantise: Quantise,
    fields: Mapping[str, Any] | None = None,
    only: Container[str] | None = None,
) -> Path:
    """Writes a file. `fields`: additional metadata. `only`: names of the tensors to write; None: all."""
    config = json.loads((directory / "config.json").read_text())
    name = ARCHITECTURES[config["model_type"]]
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(path, name)
    _write_config(writer, config, name)
    for key, value in (fields or {}).items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = _merged_experts(load_file(directory / "model.safetensors"))
    for hf_name, values in (_split_experts(tensors) if name == "gpt-oss" else tensors).items():
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        if only is not None and gguf_name not in only:
            continue
        converted = _converted(hf_name, values, config, name).numpy()
        data, kind = quantise(gguf_name, np.ascontiguousarray(converted))
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
    for factors_name, factors in _rope_factors(config).items():
        writer.add_tensor(factors_name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_fields(directory: Path, pre: str) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer, from tokenizer.json and tokenizer_config.json."""
    stored = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["content"]: token["id"] for token in stored["added_tokens"]}
    ids = stored["model"]["vocab"] | added
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__),
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in sorted(ids, key=ids.__getitem__)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids[config["eos_token"]],
        "tokenizer.chat_template": config.get("chat_template", ""),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
    }  # fmt: skip
    add: Callable[[str, Any], None] = kind.get(type(value), writer.add_array)
    add(key, value)


def _converted(name: str, values: torch.Tensor, config: dict[str, Any], architecture: str) -> torch.Tensor:
    values = values.float()
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1.0
    if architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _merged_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    merged: dict[str, list[torch.Tensor]] = {}
    plain = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if match := EXPERT.fullmatch(name):
            merged.setdefault(f"{match[1]}.{match[3]}.weight", []).append(tensors[name])
        else:
            plain[name] = tensors[name]
    return plain | {name: torch.stack(parts) for name, parts in merged.items()}


def _split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts gpt-oss's experts from [E, ins, outs] with alternating gate and up to [E, outs, ins] of each.

    Adds `.weight` or `.bias` to names without a suffix.
    """
    split = {}
    for name, values in tensors.items():
        kind = "bias" if name.endswith("_proj_bias") else "weight"
        module = name.removesuffix("_bias")
        if module.endswith("experts.gate_up_proj"):
            rows = values if kind == "bias" else values.transpose(1, 2)
            split[f"{module.replace('gate_up', 'gate')}.{kind}"] = rows[:, 0::2]
            split[f"{module.replace('gate_up', 'up')}.{kind}"] = rows[:, 1::2]
        elif module.endswith("experts.down_proj"):
            split[f"{module}.{kind}"] = values if kind == "bias" else values.transpose(1, 2)
        else:
            split[f"{name}.weight" if name.endswith("sinks") else name] = values
    return split


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if architecture in ("gemma2", "gemma3", "gpt-oss", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config or architecture == "gpt-oss":
            inner = config.get("moe_intermediate_size") or config["intermediate_size"]
            writer.add_expert_feed_forward_length(inner)
    if architecture == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(1.0)


def _rope_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": rope["long_factor"],
            "rope_factors_short.weight": rope["short_factor"],
        }
    return {"rope_freqs.weight": _llama3_factors(config, rope)} if rope.get("rope_type") == "llama3" else {}


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> list[float]:
    dim = config["hidden_size"] // config["num_attention_heads"]
    original, factors = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
