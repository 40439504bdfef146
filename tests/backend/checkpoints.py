"""Tiny random checkpoints, made with transformers: the oracle for everything that computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 256

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}


def build_model(name: str) -> PreTrainedModel:
    """Random weights, but none that would hide a fault: biases and norms are random too, and scaled embeddings put
    a gap between the first and the second token, so that rounding decides nothing."""
    torch.manual_seed(sum(name.encode()))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE, **CHECKPOINTS[name]))
    model = model.float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith(("lm_head.weight", "embed_tokens.weight")):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.3)
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory
