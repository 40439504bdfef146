"""The decoder that Llama and its relatives share: rotary attention over a paged cache, a gated MLP, and norms.

A family member says where it differs, by the marks at the top of `Decoder` and by the kind of its layers: each is one
of `backend.models.layers`.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import ClassVar

import torch
from torch import Tensor

from backend.layers.attention import PagedAttention
from backend.layers.loader import LayerLoader
from backend.layers.mlp import PLAIN_NAMES, GatedMlp, SparseMlp
from backend.layers.rope import RopeTable
from backend.layers.step import LayerCache, Step
from backend.models.config import ExpertsConfig, LayerConfig, ModelConfig
from backend.models.layers import DecoderLayer, PreNormLayer


class Decoder:
    """Weights and how they are arranged. `forward` is all layers and the final norm; `logits` is separate, since only
    the last token of each request needs them."""

    layer_kind: ClassVar[type[DecoderLayer]] = PreNormLayer
    qk_norm: ClassVar[str | None] = None  # a norm on every query and key "head" before rotation, or on "all" of them
    norm_offset: ClassVar[float] = 0.0
    packed_qkv: ClassVar[str | None] = None  # the checkpoint's name for the three projections, where they are one
    mlp_names: ClassVar[tuple[str, ...]] = PLAIN_NAMES
    expert_names: ClassVar[tuple[str, ...]] = PLAIN_NAMES
    sparse_name: ClassVar[str] = "mlp"

    @staticmethod
    def has_qkv_bias(config: ModelConfig) -> bool:
        return config.attention_bias

    @staticmethod
    def has_output_bias(config: ModelConfig) -> bool:
        return config.attention_bias

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        return config.embedding_scale

    def __init__(self, config: ModelConfig, loader: LayerLoader, max_model_len: int, device: torch.device) -> None:
        loader = loader.of_family(norm_offset=self.norm_offset)
        model = loader.below("model")
        self._config = config
        self._ops = loader.ops
        self._embedding = model.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
        scale = self.embedding_scale(config)
        self._embedding_scale = torch.tensor(scale, dtype=self._embedding.dtype).item()  # rounded, as in training
        self._layers = [
            self.layer_kind(config, model.below(f"layers.{i}"), *self._sublayers(config, layer, model, i))
            for i, layer in enumerate(config.layers)
        ]
        self._norm = model.rms_norm("norm", config.hidden_size, config.rms_norm_eps)
        self._ropes = [RopeTable(rope, max_model_len, device, loader.ops) for rope in config.ropes]
        if config.tie_word_embeddings:
            loader.checkpoint.skip("lm_head.weight")
            self._lm_head = loader.quantization.linear(self._embedding, None)
            self._embedding = self._lm_head.embedding(self._embedding)
        else:
            self._lm_head = loader.linear([("lm_head", config.vocab_size)], config.hidden_size)

    def _sublayers(
        self, config: ModelConfig, layer: LayerConfig, model: LayerLoader, index: int
    ) -> tuple[PagedAttention, GatedMlp | SparseMlp]:
        loader = model.below(f"layers.{index}")
        attention = PagedAttention(
            config,
            layer,
            loader.below("self_attn"),
            qkv_bias=self.has_qkv_bias(config),
            output_bias=self.has_output_bias(config),
            qk_norm=self.qk_norm,
            packed=self.packed_qkv,
        )
        if layer.experts is not None:
            return attention, self.sparse_mlp(config, layer.experts, loader)
        return attention, GatedMlp(config, loader.below("mlp"), config.intermediate_size, self.mlp_names)

    @classmethod
    def sparse_mlp(cls, config: ModelConfig, experts: ExpertsConfig, layer: LayerLoader) -> SparseMlp:
        loader = layer.below(cls.sparse_name)
        mlps = [
            GatedMlp(config, loader.below(f"experts.{i}"), experts.intermediate_size, cls.expert_names)
            for i in range(experts.num_experts)
        ]
        return SparseMlp(loader.ops, experts, loader.router("gate", experts.num_experts, config.hidden_size), mlps)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def needs_host_sync(self) -> bool:
        """As `MixtureOfExperts` has it, of any layer's experts."""
        return any(layer.needs_host_sync for layer in self._layers)

    def embedded(self, input_ids: Tensor) -> Tensor:
        """[T] -> what the layers begin with: [T, hidden_size]."""
        embedded = self._ops.embedding(input_ids, self._embedding)
        return embedded if self._embedding_scale == 1.0 else self._ops.scale(embedded, self._embedding_scale)

    def rotations(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """[T] -> for each of the model's tables cos and sin: [T, dim / 2]."""
        return tuple(rope(positions) for rope in self._ropes)

    def forward(self, embedded: Tensor, cache: list[LayerCache], step: Step, last: Step) -> Tensor:
        """embedded: [T, hidden_size] -> final hidden states: [W, hidden_size], of the tokens that go on in `last`. That
        is the step as the last layer has it: of the others, nobody needs more than keys and values."""
        delta, residual = embedded, None
        steps = chain(repeat(step, len(self._layers) - 1), (last,))
        for layer, layer_cache, layer_step in zip(self._layers, cache, steps, strict=True):
            delta, residual = layer(delta, residual, layer_cache, layer_step)
        hidden, _ = self._norm.add(delta, residual)
        return hidden

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """The tokens of the largest logits. hidden: [N, hidden_size] -> [N] int64."""
        if self._config.logits_scale == 1.0 and self._config.logits_softcap is None:
            return self._ops.argmax(self._lm_head(hidden))  # which need not be made float32 to be compared
        return self._ops.argmax(self.logits(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, hidden_size] -> [N, vocab_size] float32."""
        return self._ops.logits(self._lm_head(hidden), self._config.logits_scale, self._config.logits_softcap)
