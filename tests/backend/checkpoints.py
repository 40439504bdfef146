"""Tiny random checkpoints, made with transformers: the oracle for everything that computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24, "tie_word_embeddings": False},
    "mistral-sliding": {"model_type": "mistral", "sliding_window": 20, "tie_word_embeddings": False},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-sliding": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-moe": {
        "model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 48, "num_experts": 6,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 40, "tie_word_embeddings": False},
    "phi3-longrope": {
        "model_type": "phi3", "tie_word_embeddings": True, "original_max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
    "gemma2": {
        "model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 18, "sliding_window": 20,
        "num_hidden_layers": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 20,
        "num_hidden_layers": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    },
    "glm": {
        "model_type": "glm", "head_dim": 24, "attention_bias": True, "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    },
    "glm4": {
        "model_type": "glm4", "head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 20,
        "num_hidden_layers": 3, "tie_word_embeddings": False, "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 16,
        },
    },
    "deepseek-v2-lite": DEEPSEEK | {
        "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "rope_parameters": DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v2": DEEPSEEK | {
        "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 0.7, "attention_bias": True,
        "rope_parameters": DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "deepseek-v3": DEEPSEEK | {
        "model_type": "deepseek_v3", "norm_topk_prob": True, "routed_scaling_factor": 0.6,
        "rope_parameters": DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "moonlight": DEEPSEEK | {
        "model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 0.6, "rms_norm_eps": 1e-5, "rope_interleave": False,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "logits_scaling": 2.0, "tie_word_embeddings": True,
    },
}  # fmt: skip


def build_model(name: str, **changes: Any) -> PreTrainedModel:
    """Random weights, but none that would hide a fault: biases and norms are random too, and scaled embeddings put
    a gap between the first and the second token, so that rounding decides nothing."""
    torch.manual_seed(sum(name.encode()))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE | CHECKPOINTS[name] | changes)
    )
    model = model.float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith(("lm_head.weight", "embed_tokens.weight")):
                # Gemma multiplies its embeddings by 8 here: larger ones would drown everything else.
                parameter.normal_(std=0.1 if name.startswith("gemma") else 0.5)
            else:
                parameter.normal_(std=0.3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("bias"):  # of the scores of DeepSeek's experts
                buffer.normal_(std=0.2)
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def random_mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, and scales that make numbers of about one."""
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(123, 126, shape, dtype=torch.uint8)


def save_gpt_oss_in_mxfp4(plain: Path, published: Path) -> None:
    """The same random model twice: its experts as transformers unpacks them, and as OpenAI published theirs."""
    torch.manual_seed(0)
    for directory in (plain, published):
        save(build_model("gpt-oss", intermediate_size=64), directory)
    tensors = load_file(plain / "model.safetensors")
    with_blocks = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, ins, outs = tensors[name].shape
        blocks, scales = random_mxfp4(experts, outs, ins // 32)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del with_blocks[name]
        with_blocks |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(with_blocks, published / "model.safetensors")
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (published / "config.json").write_text(json.dumps(config))
