"""Attention layer: query, key and value projections, rotary embedding, KV cache and output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.attention.base import AttentionVariant
from backend.layers.forward_context import ForwardContext, LayerCache
from backend.layers.loader import LayerLoader
from backend.layers.lora import LoraLinear
from backend.layers.norm import RmsNorm
from backend.models.config import LayerConfig, ModelConfig
from backend.ops.base import HeadNorms


class PagedAttention:
    """One attention layer over the paged KV cache.

    `qk_norm` is "head" for a norm of each query and key head, "all" for a norm over all heads as one vector, or None.
    `packed` is the checkpoint's name for the three projections if it stores them as one tensor.
    `rotates_neighbours` is true if a rotation turns pairs of neighbouring dimensions. The queries and keys are then
    computed in another order, in which the pairs are halves of a head. This changes no product of a query and a key.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        loader: LayerLoader,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: str | None,
        packed: str | None,
        rotates_neighbours: bool = False,
    ) -> None:
        self._ops = loader.ops
        self._head_dim = config.head_dim
        self._rope_index = layer.rope_index
        sinks = loader.tensor("sinks", config.num_heads).float() if config.attention_sinks else None
        self._span = AttentionVariant(layer.window, config.attention_softcap, sinks)
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        outs = [("q_proj", self._q_size), ("k_proj", self._kv_size), ("v_proj", self._kv_size)]
        if packed is not None:
            outs = [(packed, self._q_size + 2 * self._kv_size)]
        orders: dict[str, Tensor] = {}
        if rotates_neighbours and layer.rope_index is not None:
            rotated = config.ropes[layer.rope_index].dim
            orders = {
                name: _order_of_halves(size // config.head_dim, config.head_dim, rotated) for name, size in outs[:2]
            }
        self._qkv = loader.adaptable(outs, config.hidden_size, bias=qkv_bias, orders=orders)
        self._output = loader.adaptable([("o_proj", config.hidden_size)], self._q_size, bias=output_bias)
        self._head_norms: HeadNorms | None = None
        self._whole_norms: tuple[RmsNorm, RmsNorm] | None = None
        if qk_norm is not None:
            is_whole = qk_norm == "all"
            sizes = (self._q_size, self._kv_size) if is_whole else (config.head_dim, config.head_dim)
            query_norm, key_norm = (
                loader.rms_norm(name, size, config.rms_norm_eps)
                for name, size in zip(("q_norm", "k_norm"), sizes, strict=True)
            )
            if is_whole:
                self._whole_norms = loader.division.norms_of_all_heads(query_norm, key_norm)
            else:
                self._head_norms = RmsNorm.of_heads(query_norm, key_norm)

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]:
        """The linear layers that adapters may change."""
        return self._qkv, self._output

    def __call__(self, hidden: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        """Computes the layer for the W tokens that `context.select_rows` keeps: [T, hidden_size] -> [W, hidden_size].

        Stores the keys and values of all T tokens in the cache.
        """
        return self._attend(self._qkv(hidden, context.adapters), cache, context)

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Computes the layer of norm(delta + residual). Returns its result and delta + residual of all T tokens."""
        qkv, residual = self._qkv.after_norm(norm, delta, residual, context.adapters)
        return self._attend(qkv, cache, context), residual

    def _attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        rope = self._rotation(qkv, context)
        if self._whole_norms is None:
            caches = (cache.key, cache.value)
            query = self._ops.norm_rope_store(qkv, self._head_norms, rope, caches, context.slot_mapping, cache.format)
        else:
            query = self._norm_whole_rope_store(qkv, *self._whole_norms, rope, cache, context)
        attended = context.attend(context.select_rows(query), cache.key, cache.value, self._span)
        return self._output(attended.flatten(1), context.kept_adapters)

    def _norm_whole_rope_store(
        self,
        qkv: Tensor,
        query_norm: RmsNorm,
        key_norm: RmsNorm,
        rope: tuple[Tensor, Tensor],
        cache: LayerCache,
        context: ForwardContext,
    ) -> Tensor:
        """Computes the same as `Ops.norm_rope_store`, but with norms over all heads as one vector."""
        query, key, value = torch.split(qkv, [self._q_size, self._kv_size, self._kv_size], dim=-1)
        query, key, value = (
            part.view(len(qkv), -1, self._head_dim) for part in (query_norm(query), key_norm(key), value)
        )  # [T, H, D]
        cache.store(self._ops, self._ops.rope(key, *rope), value, context.slot_mapping)
        return self._ops.rope(query, *rope)

    def _rotation(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of the layer's rotary embedding. They have zero columns if it has none."""
        if self._rope_index is not None:
            return context.rope[self._rope_index]
        none = qkv.new_empty((len(qkv), 0), dtype=torch.float32)
        return none, none


def _order_of_halves(num_heads: int, head_dim: int, rotated: int) -> Tensor:
    """The outputs of a projection, with the first and then the second dimension of each rotated pair of a head."""
    dims = torch.arange(head_dim)
    one_head = torch.cat((dims[:rotated:2], dims[1:rotated:2], dims[rotated:]))
    return (torch.arange(num_heads)[:, None] * head_dim + one_head).flatten()
