"""Where the norms of a layer stand: before its sublayers, after them, or both.

A layer takes and gives its predecessor's last result apart from the residual, so that each sum is fused with a norm
where a norm follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from backend.layers.attention import PagedAttention
from backend.layers.loader import LayerLoader
from backend.layers.mlp import GatedMlp, SparseMlp
from backend.layers.norm import RmsNorm
from backend.layers.step import LayerCache, Step
from backend.models.config import ModelConfig


class DecoderLayer(ABC):
    def __init__(
        self, config: ModelConfig, loader: LayerLoader, attention: PagedAttention, mlp: GatedMlp | SparseMlp
    ) -> None:
        self._ops = loader.ops
        self._attention = attention
        self._mlp = mlp
        self._load_norms(config, loader)

    @property
    def needs_host_sync(self) -> bool:
        """As `MixtureOfExperts` has it."""
        return self._mlp.needs_host_sync

    @abstractmethod
    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None: ...

    @abstractmethod
    def __call__(self, delta: Tensor, residual: Tensor | None, cache: LayerCache, step: Step) -> tuple[Tensor, Tensor]:
        """delta, residual: [T, hidden_size] -> [W, hidden_size], of the tokens that go on. The first layer has no
        residual yet."""


def _norm(config: ModelConfig, loader: LayerLoader, name: str) -> RmsNorm:
    return loader.rms_norm(name, config.hidden_size, config.rms_norm_eps)


class PreNormLayer(DecoderLayer):
    """Llama's: a norm before each sublayer."""

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        self._input_norm = _norm(config, loader, "input_layernorm")
        self._mlp_norm = _norm(config, loader, "post_attention_layernorm")

    def __call__(self, delta: Tensor, residual: Tensor | None, cache: LayerCache, step: Step) -> tuple[Tensor, Tensor]:
        normed, residual = self._input_norm.add(delta, residual)
        delta = self._attention(normed, cache, step)
        normed, residual = self._mlp_norm.add(delta, step.going_on(residual))
        return self._mlp(normed), residual


class ScaledLayer(PreNormLayer):
    """Granite's: what a sublayer adds is scaled."""

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        super()._load_norms(config, loader)
        self._scale = config.residual_scale

    def __call__(self, delta: Tensor, residual: Tensor | None, cache: LayerCache, step: Step) -> tuple[Tensor, Tensor]:
        normed, residual = self._input_norm.add(delta, residual)
        delta = self._ops.scale(self._attention(normed, cache, step), self._scale)
        normed, residual = self._mlp_norm.add(delta, step.going_on(residual))
        return self._ops.scale(self._mlp(normed), self._scale), residual


class SandwichNormLayer(DecoderLayer):
    """Gemma 2's and 3's: a norm before each sublayer, and one after it."""

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        self._input_norm = _norm(config, loader, "input_layernorm")
        self._attention_norm = _norm(config, loader, "post_attention_layernorm")
        self._mlp_norm = _norm(config, loader, "pre_feedforward_layernorm")
        self._output_norm = _norm(config, loader, "post_feedforward_layernorm")

    def __call__(self, delta: Tensor, residual: Tensor | None, cache: LayerCache, step: Step) -> tuple[Tensor, Tensor]:
        normed, residual = self._input_norm.add(delta, residual)
        delta = self._attention_norm(self._attention(normed, cache, step))
        normed, residual = self._mlp_norm.add(delta, step.going_on(residual))
        return self._output_norm(self._mlp(normed)), residual


class PostNormLayer(DecoderLayer):
    """OLMo 2's: no norm before a sublayer, one after it."""

    def _load_norms(self, config: ModelConfig, loader: LayerLoader) -> None:
        self._attention_norm = _norm(config, loader, "post_attention_layernorm")
        self._output_norm = _norm(config, loader, "post_feedforward_layernorm")

    def __call__(self, delta: Tensor, residual: Tensor | None, cache: LayerCache, step: Step) -> tuple[Tensor, Tensor]:
        residual = delta if residual is None else self._ops.add(delta, residual)
        attended = self._attention_norm(self._attention(residual, cache, step))
        residual = self._ops.add(step.going_on(residual), attended)
        return self._output_norm(self._mlp(residual)), residual
