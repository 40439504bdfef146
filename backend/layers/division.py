"""How a model is divided among processes. The default, `Division`, is one process that computes all of it.

Tensor parallelism (backend/parallel/) overrides the methods. The layers themselves do not know whether they are whole:
they are built from a configuration with fewer heads and narrower MLPs, and from parts of the checkpoint's tensors.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from backend.layers.forward_context import ForwardContext, LayerCache
from backend.layers.lora import AdapterRows, LoraLinear
from backend.layers.norm import RmsNorm
from backend.model_files.quantized_tensor import StoredTensor
from backend.quantization.base import Embedding, Linear


class AttentionLayer(Protocol):
    """The attention of a decoder layer, as `PagedAttention` describes it."""

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]: ...

    def __call__(self, hidden: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor: ...

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]: ...


class MlpLayer(Protocol):
    """The MLP of a decoder layer, as `DenseMlp` describes it."""

    @property
    def needs_host_sync(self) -> bool: ...

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]: ...

    def __call__(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor: ...

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor, adapters: AdapterRows | None
    ) -> tuple[Tensor, Tensor]: ...


class Division:
    """One process computes the whole model."""

    def part(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """The part of a stored tensor that this process loads."""
        return tensor

    def attention(self, attention: AttentionLayer) -> AttentionLayer:
        """An attention layer whose result is that of the whole layer."""
        return attention

    def mlp(self, mlp: MlpLayer) -> MlpLayer:
        """An MLP whose result is that of the whole MLP."""
        return mlp

    def norms_of_all_heads(self, query: RmsNorm, key: RmsNorm) -> tuple[RmsNorm, RmsNorm]:
        """Norms of queries and of keys over all heads as one vector."""
        return query, key

    def embedding(self, embedding: Embedding) -> Embedding:
        """An embedding of all tokens."""
        return embedding

    def head(self, head: Linear) -> Linear:
        """An output head with the logits of all tokens."""
        return head


WHOLE = Division()
