"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1), in its expanded form.

Keys and values of all heads are computed from one narrow vector of a token, its latent. A head of a query or key has a
plain part, and a part that is rotated. The rotated part of a key is the same for all heads.

The cache stores the expanded keys and values, so attention, cache formats and the prefix cache are those of all other
models. Values are padded with zeros to the size of a key. vLLM stores latents instead, in much less memory
(docs/explanation/engine.md), and its attention multiplies by the matrices that expand them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.attention.base import FULL_ATTENTION
from backend.layers.forward_context import ForwardContext, LayerCache
from backend.layers.loader import LayerLoader
from backend.layers.lora import LoraLinear
from backend.layers.norm import RmsNorm
from backend.models.config import ModelConfig
from backend.models.deepseek_config import LatentConfig

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is, as in training


class LatentAttention:
    """One layer of multi-head latent attention over the paged KV cache.

    A head begins with its rotated part, in which the pairs of a rotation are halves. The checkpoint has another order;
    queries and keys change in the same way, so their products stay the same.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, rope_index: int, loader: LayerLoader) -> None:
        self._ops = loader.ops
        self._latent = latent
        self._rope_index = rope_index
        loader.checkpoint.skip(f"{loader.prefix}rotary_emb.inv_freq")  # which some checkpoints store, and `rope` has
        queries, num_heads = "q_proj" if latent.query_rank is None else "q_b_proj", config.num_heads
        down = ("kv_a_proj_with_mqa", latent.rank + latent.rotated_dim)
        of_query = (queries, num_heads * latent.head_dim)
        orders = {queries: _query_order(latent, num_heads), down[0]: _latent_order(latent)}
        self._query_up: tuple[RmsNorm, LoraLinear] | None = None
        if latent.query_rank is not None:
            norm = loader.rms_norm("q_a_layernorm", latent.query_rank, LATENT_EPS)
            self._query_up = norm, loader.adaptable([of_query], latent.query_rank, orders=orders)
            of_query = ("q_a_proj", latent.query_rank)
        self._sizes = [of_query[1], latent.rank, latent.rotated_dim]
        self._down = loader.adaptable([of_query, down], config.hidden_size, bias=config.attention_bias, orders=orders)
        self._norm = loader.rms_norm("kv_a_layernorm", latent.rank, LATENT_EPS)
        self._up = loader.adaptable([("kv_b_proj", num_heads * (latent.plain_dim + latent.value_dim))], latent.rank)
        self._output = loader.adaptable(
            [("o_proj", config.hidden_size)], num_heads * latent.value_dim, bias=config.attention_bias
        )

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]:
        """The linear layers that adapters may change."""
        query_up = () if self._query_up is None else self._query_up[1:]
        return self._down, *query_up, self._up, self._output

    def __call__(self, hidden: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        """As `PagedAttention.__call__`."""
        return self._attend(self._down(hidden, context.adapters), cache, context)

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor | None, cache: LayerCache, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """As `PagedAttention.after_norm`."""
        down, residual = self._down.after_norm(norm, delta, residual, context.adapters)
        return self._attend(down, cache, context), residual

    def _attend(self, down: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        query, latents, rotated_key = torch.split(down, self._sizes, dim=-1)
        rope = context.rope[self._rope_index]
        if self._query_up is not None:
            query_norm, query_up = self._query_up
            query, _ = query_up.after_norm(query_norm, query, None, context.adapters)
        query = self._ops.rope(query.view(len(down), -1, self._latent.head_dim), *rope)  # [T, H, D]
        self._store(latents, self._ops.rope(rotated_key[:, None], *rope), cache, context)
        attended = context.attend(context.select_rows(query), cache.key, cache.value, FULL_ATTENTION)
        values = attended[..., : self._latent.value_dim]
        return self._output(values.flatten(1), context.kept_adapters)

    def _store(self, latents: Tensor, rotated_key: Tensor, cache: LayerCache, context: ForwardContext) -> None:
        """Expands latents [T, rank] to keys and values, and stores these. rotated_key: [T, 1, rotated_dim]."""
        latent = self._latent
        expanded, _ = self._up.after_norm(self._norm, latents, None, context.adapters)
        heads = expanded.view(len(latents), -1, latent.plain_dim + latent.value_dim)
        plain_key, value = torch.split(heads, [latent.plain_dim, latent.value_dim], dim=-1)
        key = torch.cat((rotated_key.expand(-1, heads.shape[1], -1), plain_key), dim=-1)
        cache.store(self._ops, key, F.pad(value, (0, latent.head_dim - latent.value_dim)), context.slot_mapping)


def _rotated_order(latent: LatentConfig) -> Tensor:
    """The rotated dimensions of a head, with the first and then the second dimension of each pair."""
    dims = torch.arange(latent.rotated_dim)
    return torch.cat((dims[0::2], dims[1::2])) if latent.rotates_neighbours else dims


def _query_order(latent: LatentConfig, num_heads: int) -> Tensor:
    """The outputs of the query projection, with the rotated part of each head first."""
    one_head = torch.cat((latent.plain_dim + _rotated_order(latent), torch.arange(latent.plain_dim)))
    return (torch.arange(num_heads)[:, None] * latent.head_dim + one_head).flatten()


def _latent_order(latent: LatentConfig) -> Tensor:
    """The outputs of the projection to the latent and the rotated part of keys."""
    return torch.cat((torch.arange(latent.rank), latent.rank + _rotated_order(latent)))
