"""A rank's model as a part of the whole: its tensors, and the exchanges that make its layers' results whole."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.layers.division import AttentionLayer, Division, MlpLayer
from backend.layers.forward_context import ForwardContext, LayerCache
from backend.layers.lora import AdapterRows, LoraLinear
from backend.layers.norm import RmsNorm
from backend.model_files.quantized_tensor import StoredTensor
from backend.parallel.group import RankGroup
from backend.parallel.shards import Shards
from backend.quantization.base import Embedding, Linear


class RankDivision(Division):
    """One rank's part of a model."""

    def __init__(self, shards: Shards, group: RankGroup) -> None:
        self._shards = shards
        self._group = group

    def part(self, name: str, tensor: StoredTensor) -> StoredTensor:
        return self._shards.part(name, tensor)

    def attention(self, attention: AttentionLayer) -> AttentionLayer:
        return _SummedAttention(attention, self._group)

    def mlp(self, mlp: MlpLayer) -> MlpLayer:
        return _SummedMlp(mlp, self._group)

    def norms_of_all_heads(self, query: RmsNorm, key: RmsNorm) -> tuple[RmsNorm, RmsNorm]:
        return _NormOfAllHeads(query, self._group), _NormOfAllHeads(key, self._group)

    def embedding(self, embedding: Embedding) -> Embedding:
        return _SummedEmbedding(embedding, self._group, self._shards.vocab_rows)

    def head(self, head: Linear) -> Linear:
        return _CollectedHead(head, self._group, self._shards.vocab_size)


class _SummedAttention:
    """Each rank computes some heads, and their share of the output projection."""

    def __init__(self, attention: AttentionLayer, group: RankGroup) -> None:
        self._attention, self._group = attention, group

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]:
        return self._attention.lora_layers

    def __call__(self, hidden: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        return self._group.add_up(self._attention(hidden, cache, context))

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        delta, residual = self._attention.after_norm(norm, delta, residual, cache, context)
        return self._group.add_up(delta), residual


class _SummedMlp:
    """Each rank computes a part of the width of an MLP, or of each expert."""

    def __init__(self, mlp: MlpLayer, group: RankGroup) -> None:
        self._mlp, self._group = mlp, group

    @property
    def needs_host_sync(self) -> bool:
        return self._mlp.needs_host_sync

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]:
        return self._mlp.lora_layers

    def __call__(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self._group.add_up(self._mlp(hidden, adapters))

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor, adapters: AdapterRows | None
    ) -> tuple[Tensor, Tensor]:
        delta, residual = self._mlp.after_norm(norm, delta, residual, adapters)
        return self._group.add_up(delta), residual


class _NormOfAllHeads(RmsNorm):
    """Each rank has some heads of a vector. If several ranks have the same one, all heads have equally many copies."""

    def __init__(self, norm: RmsNorm, group: RankGroup) -> None:
        super().__init__(norm.ops, norm.weight, norm.eps)
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        values = x.float()
        sums = self._group.add_up(values.square().sum(-1, keepdim=True))
        means = sums / (self._group.size * x.shape[-1])
        return (values * torch.rsqrt(means + self.eps) * self.weight.float()).to(x.dtype)


class _SummedEmbedding(Embedding):
    """Each rank has the rows of some token ids; for all others, its result is zero."""

    def __init__(self, embedding: Embedding, group: RankGroup, rows: range) -> None:
        self._embedding, self._group, self._rows = embedding, group, rows

    def __call__(self, ids: Tensor) -> Tensor:
        places = ids - self._rows.start
        is_elsewhere = (places < 0) | (places >= len(self._rows))
        embedded = self._embedding(places.masked_fill_(is_elsewhere, 0))
        return self._group.add_up(embedded.masked_fill_(is_elsewhere[:, None], 0.0))


class _CollectedHead(Linear):
    """Each rank computes the logits of some token ids."""

    def __init__(self, head: Linear, group: RankGroup, vocab_size: int) -> None:
        self._head, self._group, self._vocab_size = head, group, vocab_size

    def __call__(self, x: Tensor) -> Tensor:
        # The last rank's rows may be padded.
        return self._group.collect(self._head(x))[:, : self._vocab_size].contiguous()

    def ungated(self, x: Tensor) -> Tensor:
        return self(x)
