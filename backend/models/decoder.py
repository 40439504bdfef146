"""The decoder that Llama and its relatives share: pre-norm, rotary attention over a paged cache, a gated MLP.

A family member says where it differs, by the three marks at the top of `Decoder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.attention.base import StepAttention
from backend.layers.loader import LayerLoader
from backend.layers.norm import RmsNorm
from backend.layers.rope import RopeTable
from backend.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerCache:
    key: Tensor  # [num_blocks, block_size, Hkv, D]
    value: Tensor


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """What every layer of one step needs to know. T tokens, over all requests."""

    cos: Tensor  # [T, D / 2] float32
    sin: Tensor
    slot_mapping: Tensor  # [T] int64: where each token's key and value go
    attend: StepAttention


class Decoder:
    """Weights and how they are arranged. `forward` ends with the final norm; `logits` is separate, since only the
    last token of each request needs them."""

    has_qk_norm: ClassVar[bool] = False  # a norm on every query and key head, before they are rotated

    @staticmethod
    def has_qkv_bias(config: ModelConfig) -> bool:
        return config.attention_bias

    @staticmethod
    def has_output_bias(config: ModelConfig) -> bool:
        return config.attention_bias

    def __init__(self, config: ModelConfig, loader: LayerLoader, max_model_len: int, device: torch.device) -> None:
        model = loader.below("model")
        self._embedding = model.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [DecoderLayer(type(self), config, model.below(f"layers.{i}")) for i in range(config.num_layers)]
        self._norm = model.rms_norm("norm", config.hidden_size, config.rms_norm_eps)
        self._rope = RopeTable(config.rope, config.head_dim, max_model_len, device)
        if config.tie_word_embeddings:
            loader.checkpoint.skip("lm_head.weight")
            self._lm_head = loader.quantization.linear(self._embedding, None)
        else:
            self._lm_head = loader.linear([("lm_head", config.vocab_size)], config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def forward(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, cache: list[LayerCache], attend: StepAttention
    ) -> Tensor:
        """input_ids, positions, slot_mapping: [T] -> final hidden states: [T, hidden_size]."""
        step = DecoderStep(*self._rope(positions), slot_mapping, attend)
        delta = F.embedding(input_ids, self._embedding)
        residual = torch.zeros_like(delta)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            delta, residual = layer(delta, residual, layer_cache, step)
        hidden, _ = self._norm.add(delta, residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, hidden_size] -> [N, vocab_size] float32."""
        return self._lm_head(hidden).float()


class DecoderLayer:
    def __init__(self, family: type[Decoder], config: ModelConfig, loader: LayerLoader) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._input_norm = loader.rms_norm("input_layernorm", size, eps)
        self._attention = DecoderAttention(family, config, loader.below("self_attn"))
        self._mlp_norm = loader.rms_norm("post_attention_layernorm", size, eps)
        self._mlp = GatedMlp(config, loader.below("mlp"))

    def __call__(self, delta: Tensor, residual: Tensor, cache: LayerCache, step: DecoderStep) -> tuple[Tensor, Tensor]:
        """Takes and gives the last sublayer's result apart from the residual, so that each sum is fused with a norm."""
        normed, residual = self._input_norm.add(delta, residual)
        delta = self._attention(normed, cache, step)
        normed, residual = self._mlp_norm.add(delta, residual)
        return self._mlp(normed), residual


class DecoderAttention:
    def __init__(self, family: type[Decoder], config: ModelConfig, loader: LayerLoader) -> None:
        self._ops = loader.ops
        self._head_dim = config.head_dim
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        outs = [("q_proj", self._q_size), ("k_proj", self._kv_size), ("v_proj", self._kv_size)]
        self._qkv = loader.linear(outs, config.hidden_size, bias=family.has_qkv_bias(config))
        self._output = loader.linear(
            [("o_proj", config.hidden_size)], self._q_size, bias=family.has_output_bias(config)
        )
        self._q_norm: RmsNorm | None = None
        self._k_norm: RmsNorm | None = None
        if family.has_qk_norm:
            self._q_norm = loader.rms_norm("q_norm", config.head_dim, config.rms_norm_eps)
            self._k_norm = loader.rms_norm("k_norm", config.head_dim, config.rms_norm_eps)

    def __call__(self, hidden: Tensor, cache: LayerCache, step: DecoderStep) -> Tensor:
        query, key, value = (
            part.view(len(hidden), -1, self._head_dim)  # [T, H, D]
            for part in torch.split(self._qkv(hidden), [self._q_size, self._kv_size, self._kv_size], dim=-1)
        )
        if self._q_norm and self._k_norm:
            query, key = self._q_norm(query), self._k_norm(key)
        query, key = self._ops.rope(query, step.cos, step.sin), self._ops.rope(key, step.cos, step.sin)
        self._ops.store_kv(key, value, cache.key, cache.value, step.slot_mapping)
        return self._output(step.attend(query, cache.key, cache.value).flatten(1))


class GatedMlp:
    def __init__(self, config: ModelConfig, loader: LayerLoader) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self._ops = loader.ops
        self._gate_up = loader.linear([("gate_proj", inner), ("up_proj", inner)], size, bias=config.mlp_bias)
        self._down = loader.linear([("down_proj", size)], inner, bias=config.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(self._ops.silu_mul(self._gate_up(hidden)))
