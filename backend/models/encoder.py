"""Encoders: BERT, RoBERTa and XLM-RoBERTa, of which most published embedding models and rerankers are made.

All tokens of a prompt attend to each other, so the whole prompt is computed in one step, without a KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.layers.loader import LayerLoader
from backend.models.config import ModelConfig
from backend.models.encoder_config import EncoderConfig
from backend.native.recording import StopCheck, raise_if_interrupted


class _LayerNorm:
    def __init__(self, config: ModelConfig, loader: LayerLoader, eps: float) -> None:
        self._weight = loader.tensor("weight", config.hidden_size)
        self._bias = loader.tensor("bias", config.hidden_size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps)


class _EncoderLayer:
    """Attention and an MLP, each with a residual connection and a norm after it."""

    def __init__(self, config: ModelConfig, encoder: EncoderConfig, loader: LayerLoader) -> None:
        attention, size = loader.below("attention"), config.hidden_size
        self._heads = config.num_heads
        self._qkv = attention.below("self").linear([(n, size) for n in ("query", "key", "value")], size, bias=True)
        self._attended = attention.below("output").linear([("dense", size)], size, bias=True)
        self._attention_norm = _LayerNorm(config, attention.below("output.LayerNorm"), encoder.layer_norm_eps)
        inner = config.intermediate_size
        self._up = loader.below("intermediate").linear([("dense", inner)], size, bias=True)
        self._down = loader.below("output").linear([("dense", size)], inner, bias=True)
        self._output_norm = _LayerNorm(config, loader.below("output.LayerNorm"), encoder.layer_norm_eps)
        self._gelu = partial(F.gelu, approximate=encoder.gelu)

    def __call__(self, hidden: Tensor, lens: Sequence[int]) -> Tensor:
        hidden = self._attention_norm(self._attended(self._attend(self._qkv(hidden), lens)) + hidden)
        return self._output_norm(self._down(self._gelu(self._up(hidden))) + hidden)

    def _attend(self, qkv: Tensor, lens: Sequence[int]) -> Tensor:
        """qkv: [T, 3 * hidden_size] -> [T, hidden_size], one sequence after the other."""
        parts = qkv.view(len(qkv), 3, self._heads, -1).permute(1, 2, 0, 3)  # [3, H, T, D]
        attended = [F.scaled_dot_product_attention(p[0], p[1], p[2]) for p in torch.split(parts, [*lens], dim=2)]
        return torch.cat(attended, dim=1).transpose(0, 1).flatten(1)


class Encoder:
    """A loaded encoder. Its only state is its weights. Raises `WeightsError` if one is missing."""

    def __init__(self, config: ModelConfig, loader: LayerLoader) -> None:
        assert config.encoder is not None
        encoder, checkpoint, size = config.encoder, loader.checkpoint, config.hidden_size
        root = loader.below(encoder.name)
        if f"{root.prefix}embeddings.word_embeddings.weight" not in checkpoint:
            root = loader  # stored without the outer module
        self._config = encoder
        table = root.below("embeddings")
        self._words = table.tensor("word_embeddings.weight", config.vocab_size, size)
        self._positions = table.tensor("position_embeddings.weight", encoder.num_positions, size)
        self._types = table.tensor("token_type_embeddings.weight", encoder.num_types, size)
        self._norm = _LayerNorm(config, table.below("LayerNorm"), encoder.layer_norm_eps)
        self._layers = [
            _EncoderLayer(config, encoder, root.below(f"encoder.layer.{i}")) for i in range(config.num_layers)
        ]
        self._load_head(config, loader, root)
        for name in (
            "embeddings.position_ids",
            "embeddings.token_type_ids",
            "pooler.dense.weight",
            "pooler.dense.bias",
        ):
            checkpoint.skip(f"{root.prefix}{name}")

    def _load_head(self, config: ModelConfig, loader: LayerLoader, root: LayerLoader) -> None:
        """Loads the two layers of the head that scores: a dense one with tanh, and the one with the labels' logits."""
        self._head: list[tuple[Tensor, Tensor]] = []
        if config.classifier is None:
            return
        is_bert = self._config.name == "bert"
        dense = root.below("pooler.dense") if is_bert else loader.below("classifier.dense")
        labels = loader.below("classifier" if is_bert else "classifier.out_proj")
        for layer, outs in ((dense, config.hidden_size), (labels, config.classifier.num_labels)):
            weight, bias = layer.tensor("weight", outs, config.hidden_size), layer.tensor("bias", outs)
            self._head.append((weight.float(), bias.float()))

    def __call__(
        self, input_ids: Tensor, positions: Tensor, lens: Sequence[int], is_interrupted: StopCheck | None
    ) -> Tensor:
        """Computes whole prompts, one after the other: [T] ids and positions -> final hidden states [T, hidden_size].

        `lens` are the numbers of their tokens. Raises `StepInterrupted` between two layers.
        """
        embedded = F.embedding(input_ids, self._words) + self._types[self._types_of(input_ids, lens)]
        hidden = self._norm(embedded + self._positions[positions + self._config.first_position])
        for layer in self._layers:
            raise_if_interrupted(is_interrupted)
            hidden = layer(hidden, lens)
        return hidden

    def _types_of(self, input_ids: Tensor, lens: Sequence[int]) -> Tensor:
        """The segment of each token: 1 after the first separator of a prompt, unless the prompt ends with it."""
        if self._config.separator_id is None:
            return torch.zeros_like(input_ids)
        ends = (input_ids == self._config.separator_id).long()
        segments = [part.cumsum(0) - part for part in torch.split(ends, [*lens])]
        return torch.cat(segments).clamp(max=1)

    def pooled(self, hidden: Tensor) -> Tensor:
        """As `Decoder.pooled`."""
        hidden = hidden.float()
        if not self._head:
            return hidden
        dense, labels = self._head
        return F.linear(torch.tanh(F.linear(hidden, *dense)), *labels)
