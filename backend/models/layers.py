"""Decoder layers, one class per placement of the norms: before the sublayers, after them, or both.

A layer receives and returns the last sublayer's output (`delta`) separately from the residual. So each addition to the
residual can be fused with the norm that follows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from backend.layers.division import AttentionLayer, MlpLayer
from backend.layers.forward_context import ForwardContext, LayerCache
from backend.layers.loader import LayerLoader
from backend.layers.lora import LoraLinear
from backend.layers.norm import RmsNorm
from backend.models.config import ModelConfig


class DecoderLayer(ABC):
    """Base class of decoder layers: attention and an MLP with norms and residual connections."""

    def __init__(self, config: ModelConfig, loader: LayerLoader, attention: AttentionLayer, mlp: MlpLayer) -> None:
        self._ops = loader.ops
        self._attention = loader.division.attention(attention)
        self._mlp = loader.division.mlp(mlp)
        self._load_norms(config, loader)

    @property
    def needs_host_sync(self) -> bool:
        """Whether a step waits for the device in this layer, as in `MixtureOfExperts`."""
        return self._mlp.needs_host_sync

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]:
        """The linear layers that adapters may change."""
        return *self._attention.lora_layers, *self._mlp.lora_layers

    @abstractmethod
    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None: ...

    @abstractmethod
    def __call__(
        self, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Computes the layer and returns the new delta and residual, both [W, hidden_size].

        delta, residual: [T, hidden_size]; `residual` is None in the first layer. W is the number of tokens that
        `context.select_rows` keeps.
        """


def _norm(config: ModelConfig, loader: LayerLoader, name: str) -> RmsNorm:
    return loader.rms_norm(name, config.hidden_size, config.rms_norm_eps)


class PreNormLayer(DecoderLayer):
    """Decoder layer of Llama, with a norm before each sublayer."""

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        self._input_norm = _norm(config, loader, "input_layernorm")
        self._mlp_norm = _norm(config, loader, "post_attention_layernorm")

    def __call__(
        self, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        delta, residual = self._attention.after_norm(self._input_norm, delta, residual, cache, context)
        return self._mlp.after_norm(self._mlp_norm, delta, context.select_rows(residual), context.kept_adapters)


class ScaledLayer(PreNormLayer):
    """Decoder layer of Granite: Llama's layer with the output of each sublayer scaled."""

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        super()._load_norms(config, loader)
        self._scale = config.residual_scale

    def __call__(
        self, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        delta, residual = self._attention.after_norm(self._input_norm, delta, residual, cache, context)
        delta = self._ops.scale(delta, self._scale)
        delta, residual = self._mlp.after_norm(
            self._mlp_norm, delta, context.select_rows(residual), context.kept_adapters
        )
        return self._ops.scale(delta, self._scale), residual


class SandwichNormLayer(DecoderLayer):
    """Decoder layer of Gemma 2 and 3, with a norm before and a norm after each sublayer."""

    norm_names: ClassVar[tuple[str, str, str, str]] = (  # in the order in which they are applied
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        self._input_norm, self._attention_norm, self._mlp_norm, self._output_norm = (
            _norm(config, loader, name) for name in self.norm_names
        )

    def __call__(
        self, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        delta, residual = self._attention.after_norm(self._input_norm, delta, residual, cache, context)
        delta = self._attention_norm(delta)
        delta, residual = self._mlp.after_norm(
            self._mlp_norm, delta, context.select_rows(residual), context.kept_adapters
        )
        return self._output_norm(delta), residual


class PostNormLayer(DecoderLayer):
    """Decoder layer of OLMo 2, with a norm after each sublayer and none before it."""

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        self._attention_norm = _norm(config, loader, "post_attention_layernorm")
        self._output_norm = _norm(config, loader, "post_feedforward_layernorm")

    def __call__(
        self, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        residual = delta if residual is None else self._ops.add(delta, residual)
        attended = self._attention_norm(self._attention(residual, cache, context))
        residual = self._ops.add(context.select_rows(residual), attended)
        return self._output_norm(self._mlp(residual, context.kept_adapters)), residual
