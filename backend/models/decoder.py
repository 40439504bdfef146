"""The decoder that all architectures share: paged attention with rotary embeddings, gated MLPs and RMS norms.

An architecture is a subclass. It overrides the class attributes at the top of `Decoder` where it differs, and its
`layer_kind` is one of the classes in `backend.models.layers`. `forward` runs all layers and the final norm. `logits`
and `greedy_tokens` apply the output head. They are separate because most sequences need it for their last token only.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import ClassVar

import torch
from torch import Tensor

from backend.layers.attention import PagedAttention
from backend.layers.division import AttentionLayer, MlpLayer
from backend.layers.forward_context import ForwardContext, LayerCache
from backend.layers.gates import TopKGate
from backend.layers.loader import LayerLoader
from backend.layers.lora import LoraTarget
from backend.layers.mlp import PLAIN_NAMES, DenseMlp, GatedMlp, Mlp, SparseMlp
from backend.layers.rope import RopeTable
from backend.models.config import ExpertsConfig, LayerConfig, ModelConfig
from backend.models.layers import DecoderLayer, PreNormLayer
from backend.models.score_head import ScoreHead


class Decoder:
    """Loaded model. Its only state is its weights: the caller passes the KV cache to `forward`.

    The constructor takes all tensors that it needs from the loader's checkpoint. It raises `WeightsError` if one is
    missing or has another shape.
    """

    layer_kind: ClassVar[type[DecoderLayer]] = PreNormLayer
    qk_norm: ClassVar[str | None] = None  # norm before rotation, of each "head" or over "all" heads
    norm_offset: ClassVar[float] = 0.0
    rotates_neighbours: ClassVar[bool] = False  # rotary pairs are neighbouring dimensions, not halves of a head
    packed_qkv: ClassVar[str | None] = None  # the checkpoint's name of a fused query, key and value projection
    mlp_names: ClassVar[tuple[str, ...]] = PLAIN_NAMES
    expert_names: ClassVar[tuple[str, ...]] = PLAIN_NAMES
    sparse_name: ClassVar[str] = "mlp"

    @staticmethod
    def has_qkv_bias(config: ModelConfig) -> bool:
        """Whether the query, key and value projections have a bias."""
        return config.attention_bias

    @staticmethod
    def has_output_bias(config: ModelConfig) -> bool:
        """Whether the attention's output projection has a bias."""
        return config.attention_bias

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        """Returns the factor by which embeddings are multiplied."""
        return config.embedding_scale

    def __init__(self, config: ModelConfig, loader: LayerLoader, max_model_len: int, device: torch.device) -> None:
        loader = loader.with_norm_offset(self.norm_offset)
        model = loader.below("model")
        self._config = config
        self._ops = loader.ops
        self.dtype = loader.checkpoint.dtype
        embedding = loader.checkpoint.take_packed(
            f"{model.prefix}embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        scale = self.embedding_scale(config)
        self._embedding_scale = torch.tensor(
            scale, dtype=self.dtype
        ).item()  # rounded to the model's dtype, as in training
        self._layers = [
            self.layer_kind(config, model.below(f"layers.{i}"), *self._sublayers(config, layer, model, i))
            for i, layer in enumerate(config.layers)
        ]
        self._norm = model.rms_norm("norm", config.hidden_size, config.rms_norm_eps)
        self._ropes = [RopeTable(rope, max_model_len, device, loader.ops) for rope in config.ropes]
        self._classifier = ScoreHead(config, loader, embedding) if config.classifier else None
        if not config.has_lm_head or config.tie_word_embeddings:
            # Some checkpoints store tied embeddings twice, and some have a head that is not used.
            loader.checkpoint.skip("lm_head.weight")
        if not config.has_lm_head:
            self._embedding = loader.quantization.embedding(embedding)
        elif config.tie_word_embeddings:
            self._lm_head = loader.quantization.linear(embedding, None)
            self._embedding = self._lm_head.tied_embedding() or loader.quantization.embedding(embedding)
        else:
            self._embedding = loader.quantization.embedding(embedding)
            self._lm_head = loader.linear([("lm_head", config.vocab_size)], config.hidden_size)
        self._embedding = loader.division.embedding(self._embedding)
        if config.has_lm_head:
            self._lm_head = loader.division.head(self._lm_head)

    def _sublayers(
        self, config: ModelConfig, layer: LayerConfig, model: LayerLoader, index: int
    ) -> tuple[AttentionLayer, MlpLayer]:
        loader = model.below(f"layers.{index}")
        attention = self.attention(config, layer, loader.below("self_attn"))
        if layer.experts is not None:
            return attention, self.sparse_mlp(config, layer.experts, loader)
        return attention, DenseMlp(config, loader.below("mlp"), config.intermediate_size, self.mlp_names)

    def attention(self, config: ModelConfig, layer: LayerConfig, loader: LayerLoader) -> AttentionLayer:
        """Loads the attention of one layer."""
        return PagedAttention(
            config,
            layer,
            loader,
            qkv_bias=self.has_qkv_bias(config),
            output_bias=self.has_output_bias(config),
            qk_norm=self.qk_norm,
            packed=self.packed_qkv,
            rotates_neighbours=self.rotates_neighbours,
        )

    @classmethod
    def sparse_mlp(cls, config: ModelConfig, experts: ExpertsConfig, layer: LayerLoader) -> SparseMlp:
        """Loads the experts and gate of one layer."""
        loader = layer.below(cls.sparse_name)
        gate = TopKGate(loader.ops, experts, loader.router("gate", experts.num_experts, config.hidden_size))
        return SparseMlp(loader.ops, gate, cls.experts(config, experts, loader))

    @classmethod
    def experts(cls, config: ModelConfig, experts: ExpertsConfig, loader: LayerLoader) -> list[Mlp]:
        """Loads the experts of one layer, each of which the checkpoint stores separately."""
        return [
            GatedMlp(config, loader.below(f"experts.{i}"), experts.intermediate_size, cls.expert_names)
            for i in range(experts.num_experts)
        ]

    @property
    def needs_host_sync(self) -> bool:
        """Whether a step waits for the device in any layer, as in `MixtureOfExperts`."""
        return any(layer.needs_host_sync for layer in self._layers)

    @property
    def lora_targets(self) -> dict[str, LoraTarget]:
        """The modules that LoRA adapters may change, by the checkpoint's names."""
        return {
            name: target
            for layer in self._layers
            for linear in layer.lora_layers
            for name, target in linear.targets.items()
        }

    def embedded(self, input_ids: Tensor) -> Tensor:
        """Returns the embeddings of token ids: [T] -> [T, hidden_size]."""
        embedded = self._embedding(input_ids)
        return embedded if self._embedding_scale == 1.0 else self._ops.scale(embedded, self._embedding_scale)

    def rotations(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Returns the cosines and sines of positions from each of the model's rope tables, each [T, dim / 2].

        positions: [T], or [3, T] in a step with images (`RopeTable`).
        """
        sections = self._config.vision.rope_sections if self._config.vision else ()
        return tuple(rope(positions, sections) for rope in self._ropes)

    def forward(
        self, embedded: Tensor, cache: list[LayerCache], context: ForwardContext, last: ForwardContext
    ) -> Tensor:
        """Runs all layers and the final norm: embedded [T, hidden_size] -> final hidden states [W, hidden_size].

        `last` is the context of the last layer. It selects the W tokens whose hidden states are returned. The last
        layer computes only keys and values for the other tokens.
        """
        delta, residual = embedded, None
        contexts = chain(repeat(context, len(self._layers) - 1), (last,))
        for layer, layer_cache, layer_context in zip(self._layers, cache, contexts, strict=True):
            delta, residual = layer(delta, residual, layer_cache, layer_context)
        hidden, _ = self._norm.add(delta, residual)
        return hidden

    def pooled(self, hidden: Tensor) -> Tensor:
        """Applies the head that scores, if the model has one: hidden [N, hidden_size] -> [N, num_labels] float32.

        Otherwise returns the hidden states in float32.
        """
        return hidden.float() if self._classifier is None else self._classifier(hidden)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """Returns the token with the largest logit of each row: hidden [N, hidden_size] -> [N] int64."""
        return self._ops.argmax(self.scores(hidden))

    def scores(self, hidden: Tensor) -> Tensor:
        """The logits for `Ops.choose`: as `logits`, but in the model's dtype unless they are scaled or capped."""
        is_plain = self._config.logits_scale == 1.0 and self._config.logits_softcap is None
        return self._lm_head(hidden) if is_plain else self.logits(hidden)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Applies the output head: hidden [N, hidden_size] -> logits [N, vocab_size] float32.

        They are written to `out` if it is given.
        """
        logits, scale, softcap = self._lm_head(hidden), self._config.logits_scale, self._config.logits_softcap
        if out is None:
            return self._ops.logits(logits, scale, softcap)
        is_plain = scale == 1.0 and softcap is None
        return out.copy_(logits if is_plain else self._ops.logits(logits, scale, softcap))  # which also converts them
