"""Writes gpt-oss as Ollama's converter did in different releases, from a checkpoint in OpenAI's layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

OLLAMA_MXFP4 = 4
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.router": "ffn_gate_inp",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class OllamaLayout:
    """What differs between releases."""

    fused_attention: bool = False  # as in OpenAI's own files, from which the first conversion was made
    fused_experts: bool = False
    adjacent_pairs: bool = False  # adjacent MXFP4 numbers share a byte
    wide_biases: bool = True  # the experts', in float32


LAYOUTS = {
    "August 5, 2025": OllamaLayout(fused_attention=True, fused_experts=True, adjacent_pairs=True, wide_biases=False),
    "August 20": OllamaLayout(fused_experts=True, adjacent_pairs=True),
    "August 26": OllamaLayout(fused_experts=True),
    "October 6": OllamaLayout(),
}


def write_ollama(published: Path, path: Path, layout: OllamaLayout, fields: Mapping[str, Any] | None = None) -> Path:
    """Writes a file. `published`: a directory with blocks and scales. `fields`: additional metadata."""
    config = json.loads((published / "config.json").read_text())
    tensors = load_file(published / "model.safetensors")
    writer = gguf.GGUFWriter(path, "gptoss")
    for key, value in _metadata(config).items():
        writer.add_uint32(f"gptoss.{key}", value) if isinstance(value, int) else writer.add_float32(
            f"gptoss.{key}", value
        )
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string,
    }  # fmt: skip
    for key, value in (fields or {}).items():
        add: Callable[[str, Any], None] = kinds.get(type(value), writer.add_array)
        add(key, value)
    for outer, name in OUTER.items():
        _add(writer, f"{name}.weight", tensors[f"{outer}.weight"])
    for layer in range(config["num_hidden_layers"]):
        ours = {
            name.split(".", 3)[3]: value for name, value in tensors.items() if name.startswith(f"model.layers.{layer}.")
        }
        for name, value in _layer(ours, layout).items():
            if isinstance(value, tuple):
                writer.add_tensor(f"blk.{layer}.{name}", _blocks(*value, layout.adjacent_pairs), raw_dtype=Kind.MXFP4)
            else:
                wide = value.ndim == 1 or "ffn_gate_inp" in name or (name.endswith("bias") and layout.wide_biases)
                _add(writer, f"blk.{layer}.{name}", value, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if layout.adjacent_pairs:
        _renumber(path)
    return path


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.factor": float(rope["factor"]),  # and no word of YaRN
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def _layer(tensors: dict[str, Tensor], layout: OllamaLayout) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """Tensors by Ollama's names, with blocks and scales combined."""
    named: dict[str, Tensor | tuple[Tensor, Tensor]] = {"attn_sinks": tensors["self_attn.sinks"]}
    for theirs, name in NAMES.items():
        named |= {
            f"{name}.{kind}": tensors[key] for kind in ("weight", "bias") if (key := f"{theirs}.{kind}") in tensors
        }
    if layout.fused_attention:
        for kind in ("weight", "bias"):
            parts = [named.pop(f"attn_{part}.{kind}") for part in "qkv"]
            named[f"attn_qkv.{kind}"] = torch.cat(parts)  # type: ignore[arg-type]
    blocks, scales, bias = (tensors[f"mlp.experts.gate_up_proj_{kind}"] for kind in ("blocks", "scales", "bias"))
    rows = {"gate_up": slice(None)} if layout.fused_experts else {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    for part, which in rows.items():
        named[f"ffn_{part}_exps.weight"] = (blocks[:, which], scales[:, which])
        named[f"ffn_{part}_exps.bias"] = bias[:, which]
    named["ffn_down_exps.weight"] = (tensors["mlp.experts.down_proj_blocks"], tensors["mlp.experts.down_proj_scales"])
    named["ffn_down_exps.bias"] = tensors["mlp.experts.down_proj_bias"]
    return named


def _blocks(blocks: Tensor, scales: Tensor, adjacent_pairs: bool) -> np.ndarray[Any, np.dtype[Any]]:
    if not adjacent_pairs:
        numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        blocks = numbers[..., :16] | (numbers[..., 16:] << 4)
    return torch.cat((scales[..., None], blocks), dim=-1).flatten(-2).numpy()


def _add(writer: gguf.GGUFWriter, name: str, value: Tensor, wide: bool = False) -> None:
    """Adds a tensor in bfloat16, or in float32 if `wide` or a vector."""
    wide = wide or value.ndim == 1
    values = np.ascontiguousarray(value.float().numpy())
    data, kind = (values, Kind.F32) if wide else (gguf.quantize(values, Kind.BF16), Kind.BF16)
    writer.add_tensor(name, data, raw_dtype=kind)


def _renumber(path: Path) -> None:
    """Changes the type of MXFP4 tensors in the header to Ollama's first number for it."""
    content = bytearray(path.read_bytes())
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type is Kind.MXFP4:
            name = struct.pack("<Q", len(tensor.name)) + tensor.name.encode()
            at = content.index(name) + len(name) + 4 + 8 * len(tensor.shape)
            content[at : at + 4] = struct.pack("<I", OLLAMA_MXFP4)
    path.write_bytes(content)
