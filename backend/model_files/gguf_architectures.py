"""Translates GGUF's metadata and tensor names to transformers' names. Add new architectures to GGUF_ARCHITECTURES.

llama.cpp stores some tensors differently from transformers: rows of queries and keys in the order of ggml's rotation,
norm weights with their offset added, the experts of a layer in one tensor, and rotary frequencies scaled by a tensor.
This module describes how to revert these changes. GGUF omits values that llama.cpp derives; this module derives them
in the same way (`src/llama-model.cpp`, late 2025). Functions raise `UnsupportedModel`, and `MalformedGguf` for
inconsistent metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.engine.errors import UnsupportedModel
from backend.model_files.gguf_header import GgufHeader, MalformedGguf

MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_out": "self_attn.o_proj",  # Ollama's name
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors of a layer that are not a module's weight or bias.
PARAMETERS = {"attn_sinks.weight": "self_attn.sinks", "attn_sinks": "self_attn.sinks"}  # the second is Ollama's name
# Modules outside the layers.
OUTER_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

WHOLE = slice(None)

Fields = Callable[[GgufHeader], dict[str, Any]]
Rows = Callable[[GgufHeader], dict[str, dict[str, slice]]]


def _none(_: GgufHeader) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Translation of one GGUF architecture to transformers' configuration and tensor names."""

    transformers_name: str
    fields: Fields = _none  # fields of config.json in addition to `common_fields`
    modules: Mapping[str, str] = field(default_factory=dict)  # names that differ from MODULES
    fused: Rows = _none  # modules that transformers splits into several, with the rows of each
    interleaved: bool = False  # whether rows of queries and keys are in the order of ggml's "normal" rotation
    norm_offset: float = 0.0  # offset that llama.cpp has added to norm weights

    def names(self, module: str, header: GgufHeader) -> Mapping[str, slice]:
        """Returns transformers' names for a layer's module, and the rows of the tensor for each name.

        Names of experts contain `{}` for the expert's number. The result is empty if the module is unknown.
        """
        if module in (fused := self.fused(header)):
            return fused[module]
        name = {**MODULES, **self.modules}.get(module)
        return {} if name is None else {name: WHOLE}


def _key(header: GgufHeader, name: str) -> str:
    """Returns the metadata key of a field of the file's architecture."""
    return f"{header.get('general.architecture', '')}.{name}"


def _count(header: GgufHeader, name: str, default: int | None = None) -> int:
    """Reads a positive integer. A list with one value per layer is accepted if all values are equal."""
    key = _key(header, name)
    if key not in header:
        if default is None:
            raise MalformedGguf(f"{key} is missing")
        return default
    if isinstance(values := header.metadata[key], list):
        if len(set(values)) != 1:
            raise UnsupportedModel(f"{key} differs from layer to layer: {values}")
        header = GgufHeader({key: values[0]}, {})
    return header.get(key, 0, above=0)


def _factor(header: GgufHeader, name: str, default: float = 0.0) -> float:
    """Reads a positive number, or returns the default."""
    key = _key(header, name)
    return header.get(key, default, above=0) if key in header else default


def common_fields(header: GgufHeader) -> dict[str, Any]:
    """Returns the fields of config.json that all architectures have."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModel("token_embd.weight is missing or not a matrix: this is not a language model")
    num_heads, hidden_size = _count(header, "attention.head_count"), _count(header, "embedding_length")
    num_layers = _count(header, "block_count")
    if num_layers > len(header.tensors):
        raise MalformedGguf(f"{num_layers} layers, but only {len(header.tensors)} tensors")
    head_dim = _count(header, "attention.key_length", max(1, hidden_size // num_heads))
    if _count(header, "attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("attention.value_length differs from attention.key_length")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _count(header, "feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _count(header, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _factor(header, "attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": _count(header, "context_length"),
        "rope_parameters": _rope(header, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(f"blk.0.{name}.bias" in header.tensors for name in ("attn_q", "attn_qkv")),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        **_experts(header, num_layers),
    }


def _rope(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    parameters = {
        "rope_type": "default",
        "rope_theta": _factor(header, "rope.freq_base", 10_000.0),
        "partial_rotary_factor": _count(header, "rope.dimension_count", head_dim) / head_dim,
    }
    scaling = header.get(_key(header, "rope.scaling.type"), "none")
    factor = _factor(header, "rope.scaling.factor", 1.0)
    if scaling == "linear":
        return parameters | {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        for name in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
            if (key := _key(header, f"rope.scaling.{name}")) in header:
                raise UnsupportedModel(f"{key} is not supported")
        return parameters | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_context(header),
            "beta_fast": _factor(header, "rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": _factor(header, "rope.scaling.yarn_beta_slow", 1.0),
        }
    if scaling not in ("none", "longrope"):  # the factors of longrope are a tensor
        raise UnsupportedModel(f"rope.scaling.type {scaling!r} is not one of linear, yarn and longrope")
    return parameters


def original_context(header: GgufHeader) -> int:
    """Returns the context length before rope scaling, in tokens."""
    return _count(header, "rope.scaling.original_context_length", _count(header, "context_length"))


def long_rope(header: GgufHeader, short: list[float], long: list[float]) -> dict[str, Any]:
    """Returns rope parameters with a factor per frequency, for Phi-3 and Llama 3.

    Llama 3's factors do not depend on the context length.
    """
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original_context(header),
        "attention_factor": _factor(header, "rope.scaling.attn_factor", 1.0),
    }


def _experts(header: GgufHeader, num_layers: int) -> dict[str, Any]:
    if not header.get(_key(header, "expert_count"), 0):
        return {}
    return {
        "num_experts": _count(header, "expert_count"),
        "num_experts_per_tok": _count(header, "expert_used_count"),
        "moe_intermediate_size": _count(header, "expert_feed_forward_length", _count(header, "feed_forward_length")),
        # The value is true for all supported architectures. Old files omit the field.
        "norm_topk_prob": header.get(_key(header, "expert_weights_norm"), True),
        "mlp_only_layers": [i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in header.tensors],
    }


def _window(header: GgufHeader) -> dict[str, Any]:
    return {"sliding_window": header.get(_key(header, "attention.sliding_window"), 0) or None}


def _gemma2(header: GgufHeader) -> dict[str, Any]:
    return {
        **_window(header),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(header, largest=46),
        "attn_logit_softcapping": _factor(header, "attn_logit_softcapping") or None,
        "final_logit_softcapping": _factor(header, "final_logit_softcapping") or None,
    }


def _gemma3(header: GgufHeader) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": _factor(header, "rope.freq_base_swa", 10_000.0)}
    everywhere = _rope(header, _count(header, "attention.key_length"))
    return {
        **_window(header),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(header, largest=62),
        "final_logit_softcapping": _factor(header, "final_logit_softcapping") or None,
        "sliding_window_pattern": header.get(_key(header, "attention.sliding_window_pattern"), 6, above=0),
        "rope_parameters": {"sliding_attention": local, "full_attention": everywhere},
    }


def _query_scalar(header: GgufHeader, largest: int) -> float:
    """Returns the head dimension, or for the 27B models the hidden size per head.

    The number of layers identifies the 27B models.
    """
    if _count(header, "block_count") == largest:
        return _count(header, "embedding_length") / _count(header, "attention.head_count")
    return float(_count(header, "attention.key_length"))


def _gpt_oss(header: GgufHeader) -> dict[str, Any]:
    # gpt-oss was trained with YaRN's bounds unrounded. GGUF has no field for that, because llama.cpp always rounds.
    rope = _rope(header, _count(header, "attention.key_length")) | {"truncate": False}
    return {"sliding_window": _count(header, "attention.sliding_window"), "rope_parameters": rope}


def _gptoss(header: GgufHeader) -> dict[str, Any]:
    """Returns the fields of Ollama's conversion of gpt-oss, which uses YaRN although its metadata do not say so."""
    implied = {_key(header, "rope.scaling.type"): "yarn"}
    return _gpt_oss(GgufHeader({**implied, **header.metadata}, header.tensors))


def _gptoss_fused(header: GgufHeader) -> dict[str, dict[str, slice]]:
    """Returns the modules that Ollama's early conversions of gpt-oss keep fused, as in OpenAI's files.

    The rows of queries, keys and values follow one another. The rows of gate and up alternate. Later conversions
    separate these modules.
    """
    head_dim = _count(header, "attention.key_length")
    queries, keys = (head_dim * _count(header, f"attention.{name}") for name in ("head_count", "head_count_kv"))
    return {
        "attn_qkv": {
            "self_attn.q_proj": slice(0, queries),
            "self_attn.k_proj": slice(queries, queries + keys),
            "self_attn.v_proj": slice(queries + keys, None),
        },
        "ffn_gate_up_exps": {
            "mlp.experts.{}.gate_proj": slice(0, None, 2),
            "mlp.experts.{}.up_proj": slice(1, None, 2),
        },
    }


def _granite(header: GgufHeader) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {field: value for field, name in names.items() if (value := _factor(header, name))}


def _smollm3(header: GgufHeader) -> dict[str, Any]:
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(_count(header, "block_count"))]}


GEMMA_MODULES = {"ffn_norm": "pre_feedforward_layernorm"}
GPT_OSS_MODULES = {"ffn_gate_inp": "mlp.router"}
MIXTRAL_MODULES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
# By `general.architecture`. Mistral and Mixtral are "llama" too; Mixtral is recognised by its experts.
GGUF_ARCHITECTURES = {
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _gemma2, GEMMA_MODULES, norm_offset=1.0),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _gemma3, GEMMA_MODULES, norm_offset=1.0),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", _gpt_oss, GPT_OSS_MODULES),
    "gptoss": GgufArchitecture("GptOssForCausalLM", _gptoss, GPT_OSS_MODULES, _gptoss_fused),  # Ollama's name
    "granite": GgufArchitecture("GraniteForCausalLM", _granite, interleaved=True),
    "llama": GgufArchitecture("LlamaForCausalLM", interleaved=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM"),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _window, {"ffn_up": "mlp.gate_up_proj"}),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM"),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _smollm3, interleaved=True),
}
MIXTRAL = GgufArchitecture("MixtralForCausalLM", modules=MIXTRAL_MODULES, interleaved=True)


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Returns the architecture of a file. Raises `UnsupportedModel`."""
    name = header.get("general.architecture", "")
    if name not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(f"general.architecture {name!r} is not one of {', '.join(GGUF_ARCHITECTURES)}")
    return MIXTRAL if name == "llama" and header.get("llama.expert_count", 0) else GGUF_ARCHITECTURES[name]
