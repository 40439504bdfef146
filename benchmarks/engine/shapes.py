"""Checkpoints with random weights, in the shapes that the engine benchmarks use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 32_000
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3, 100 M parameters.
    "tiny": {
        "model_type": "qwen3", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    },
    # Qwen2.5-0.5B with a smaller vocabulary, 387 M parameters.
    "small": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    # Qwen3's mixture of experts, 881 M parameters, of which 175 M are active per token.
    "experts": {
        "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 512, "num_experts": 32,
        "num_experts_per_tok": 4, "norm_topk_prob": True,
    },
}  # fmt: skip


def make_checkpoint(shape: str, directory: Path, **changes: int) -> Path:
    """Write a bfloat16 checkpoint with tied embeddings, a context of 8192 and `changes` to the shape. Takes seconds."""
    torch.manual_seed(0)
    shared = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    config = AutoConfig.for_model(**{**SHAPES[shape], **shared, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory
