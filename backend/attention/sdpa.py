"""Attention by gathering each sequence's blocks and torch's own kernel: runs everywhere, and is the oracle.

The query heads that share a key/value head are folded into the query length of a decode, [B, Hkv, Hq/Hkv, D], which
the kernel takes as one small matrix. Its own `enable_gqa` computes the same three to four times slower for a single
query token (measured on a CPU). Decodes of similar length are batched behind a mask; the copy that gathering costs
is what a paged kernel saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.attention.base import Attention, AttentionMetadata, StepAttention

MAX_DECODE_GROUP = 16  # sequences per batched decode: beyond it, padding costs more than a second call


@dataclass(frozen=True, slots=True)
class _Decodes:
    """B sequences with one new token each, padded to the blocks of the longest."""

    rows: Tensor  # [B]: where their tokens stand in the step
    blocks: Tensor  # [B * blocks_per_sequence]
    padding: Tensor  # [P]: which of the gathered B * L positions lie beyond their sequence's end
    mask: Tensor  # [B, 1, 1, L], 0 or -inf

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        size, (kv_heads, head_dim) = len(self.rows), key_cache.shape[2:]
        folded = query[self.rows].view(size, kv_heads, -1, head_dim)  # [B, Hkv, G, D]
        keys, values = (
            # Zeroed beside the mask, since a NaN that a reused block still holds would survive the mask alone.
            cache.index_select(0, self.blocks)
            .flatten(0, 1)
            .index_fill_(0, self.padding, 0)
            .view(size, -1, kv_heads, head_dim)
            .transpose(1, 2)  # [B, Hkv, L, D]
            for cache in (key_cache, value_cache)
        )
        return F.scaled_dot_product_attention(folded, keys, values, self.mask, scale=scale).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens: a prompt, or a chunk of one."""

    rows: Tensor  # [Lq]
    blocks: Tensor  # [blocks_per_sequence]
    seq_len: int
    mask: Tensor | None  # [Lq, L], 0 or -inf; None: plainly causal, nothing was cached before

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        kv_heads, head_dim = key_cache.shape[2:]
        grouped = query[self.rows].view(len(self.rows), kv_heads, -1, head_dim)
        grouped = grouped.permute(1, 2, 0, 3)  # [Hkv, G, Lq, D]
        keys, values = (
            cache.index_select(0, self.blocks)
            .flatten(0, 1)[: self.seq_len]
            .transpose(0, 1)  # [Hkv, L, D]
            .unsqueeze(1)
            .expand(-1, grouped.shape[1], -1, -1)
            for cache in (key_cache, value_cache)
        )
        causal = self.mask is None
        attended = F.scaled_dot_product_attention(grouped, keys, values, self.mask, is_causal=causal, scale=scale)
        return attended.permute(2, 0, 1, 3).flatten(1, 2)


class _Step(StepAttention):
    def __init__(self, groups: list[_Decodes | _Prefill], scale: float) -> None:
        self._groups = groups
        self._scale = scale

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        output = torch.empty_like(query)
        for group in self._groups:
            output[group.rows] = group.attend(query, key_cache, value_cache, self._scale)
        return output


class SdpaAttention(Attention):
    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        starts = [*accumulate(metadata.query_lens, initial=0)]
        decodes = sorted(
            (i for i, length in enumerate(metadata.query_lens) if length == 1), key=metadata.seq_lens.__getitem__
        )
        groups: list[_Decodes | _Prefill] = [
            _decodes(metadata, starts, decodes[i : i + MAX_DECODE_GROUP], like)
            for i in range(0, len(decodes), MAX_DECODE_GROUP)
        ]
        groups += [_prefill(metadata, starts, i, like) for i, length in enumerate(metadata.query_lens) if length > 1]
        return _Step(groups, self.scale)


def _decodes(metadata: AttentionMetadata, starts: list[int], members: list[int], like: Tensor) -> _Decodes:
    seq_lens = torch.tensor([metadata.seq_lens[i] for i in members], device=like.device)
    num_blocks = -(-metadata.seq_lens[members[-1]] // metadata.block_size)
    visible = torch.arange(num_blocks * metadata.block_size, device=like.device) < seq_lens[:, None]  # [B, L]
    return _Decodes(
        rows=torch.tensor([starts[i] for i in members], device=like.device),
        blocks=metadata.block_tables[members, :num_blocks].flatten(),
        padding=(~visible).flatten().nonzero().squeeze(-1),
        mask=_additive(visible, like)[:, None, None],
    )


def _prefill(metadata: AttentionMetadata, starts: list[int], i: int, like: Tensor) -> _Prefill:
    query_len, seq_len = metadata.query_lens[i], metadata.seq_lens[i]
    positions = torch.arange(seq_len, device=like.device)
    return _Prefill(
        rows=torch.arange(starts[i], starts[i + 1], device=like.device),
        blocks=metadata.block_tables[i, : -(-seq_len // metadata.block_size)],
        seq_len=seq_len,
        mask=None if query_len == seq_len else _additive(positions <= positions[-query_len:, None], like),
    )


def _additive(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)
