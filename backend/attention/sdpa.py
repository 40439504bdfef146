"""Attention with torch alone: gathers each sequence's KV blocks and calls torch's kernel. Runs on every device.

Tests compare the other implementations with this one. `prepare` sorts the sequences of a step into groups and calls
torch's kernel once per group. Decodes of similar length form a batch with a mask (`_Decodes`). Each prompt is a group
of its own (`_Prefill`). Only blocks within a layer's sliding window are gathered.

For a decode, the query heads that share a key/value head are folded into the query length, [B, Hkv, Hq/Hkv, D]. The
kernel then treats them as one small matrix. The kernel's own `enable_gqa` is three to four times slower for a single
query token (measured on a CPU). Gathering copies the blocks; the paged kernels of the other implementations do not.

Minimal path 8 of 9. Next: ../engine/sampler.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.attention.base import FULL_ATTENTION, Attention, AttentionMetadata, AttentionVariant, StepAttention
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN

MAX_DECODE_GROUP = 16  # sequences per batched decode: in larger groups, padding costs more than a second call


@dataclass(frozen=True, slots=True)
class _Decodes:
    """A group of B sequences with one new token each, padded to the number of blocks of the longest sequence."""

    rows: Tensor  # [B]: indexes of the new tokens in the step
    blocks: Tensor  # [B * blocks_per_sequence]
    padding: Tensor  # [P]: which of the B * L gathered positions are masked
    mask: Tensor  # [B, 1, 1, L], 0 or -inf

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant,
        kv_format: KvFormat,
    ) -> Tensor:
        size, kv_heads, head_dim = len(self.rows), key_cache.shape[2], query.shape[2]
        folded = query[self.rows].view(size, kv_heads, -1, head_dim)  # [B, Hkv, G, D]
        keys, values = (
            # Padding is masked and also set to zero, because a NaN in a reused block would survive the mask alone.
            kv_format.load(cache, self.blocks, query.dtype)
            .index_fill_(0, self.padding, 0)
            .view(size, -1, kv_heads, head_dim)
            .transpose(1, 2)  # [B, Hkv, L, D]
            for cache in (key_cache, value_cache)
        )
        sinks = None if variant.sinks is None else variant.sinks.view(kv_heads, -1, 1)
        return _attend(folded, keys, values, self.mask, scale, variant.softcap, sinks).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens: a prompt or a chunk of a prompt."""

    rows: Tensor  # [Lq]
    blocks: Tensor  # [blocks_per_sequence]
    num_keys: int  # how many of the gathered positions are written
    mask: Tensor | None  # [Lq, L], 0 or -inf; None: plain causal attention without cached tokens

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant,
        kv_format: KvFormat,
    ) -> Tensor:
        kv_heads, head_dim = key_cache.shape[2], query.shape[2]
        grouped = query[self.rows].view(len(self.rows), kv_heads, -1, head_dim)
        grouped = grouped.permute(1, 2, 0, 3)  # [Hkv, G, Lq, D]
        keys, values = (
            kv_format.load(cache, self.blocks, query.dtype)[: self.num_keys]
            .transpose(0, 1)  # [Hkv, L, D]
            .unsqueeze(1)
            .expand(-1, grouped.shape[1], -1, -1)
            for cache in (key_cache, value_cache)
        )
        sinks = None if variant.sinks is None else variant.sinks.view(kv_heads, -1, 1, 1)
        attended = _attend(grouped, keys, values, self.mask, scale, variant.softcap, sinks)
        return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention with torch's kernel, or step by step if there is a softcap or sinks.

    sinks: [..., 1], appended to the scores.
    """
    if softcap is None and sinks is None:
        causal = mask is None
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, scale=scale)
    assert mask is not None  # `_prefill` always makes one for softcaps and sinks, which torch's kernel does not support
    scores = query.float() @ keys.float().transpose(-1, -2) * scale  # in float32, because the kernel sums in float32
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)


class _SdpaStep(StepAttention):
    def __init__(self, metadata: AttentionMetadata, like: Tensor, scale: float, kv_format: KvFormat) -> None:
        self._kv_format = kv_format
        self._metadata = metadata
        self._like = like
        self._scale = scale
        self._groups: dict[AttentionVariant, list[_Decodes | _Prefill]] = {}  # a model has one or two variants

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        groups = self._groups.get(variant)
        if groups is None:
            groups = self._groups[variant] = _make_groups(self._metadata, self._like, variant)
        output = torch.empty_like(query)
        for group in groups:
            output[group.rows] = group.attend(query, key_cache, value_cache, self._scale, variant, self._kv_format)
        return output


class SdpaAttention(Attention):
    """Attention by `torch.nn.functional.scaled_dot_product_attention`. Decodes quantised blocks after gathering."""

    def __init__(self, scale: float, kv_format: KvFormat = PLAIN) -> None:
        super().__init__(scale)
        self._kv_format = kv_format

    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        return _SdpaStep(metadata, like, self.scale, self._kv_format)


def _make_groups(metadata: AttentionMetadata, like: Tensor, variant: AttentionVariant) -> list[_Decodes | _Prefill]:
    starts = [*accumulate(metadata.query_lens, initial=0)]
    decodes = sorted(
        (i for i, length in enumerate(metadata.query_lens) if length == 1), key=metadata.seq_lens.__getitem__
    )
    groups: list[_Decodes | _Prefill] = [
        _decodes(metadata, starts, decodes[i : i + MAX_DECODE_GROUP], like, variant.window)
        for i in range(0, len(decodes), MAX_DECODE_GROUP)
    ]
    return groups + [_prefill(metadata, starts, i, like, variant) for i, n in enumerate(metadata.query_lens) if n > 1]


def _decodes(
    metadata: AttentionMetadata, starts: list[int], members: list[int], like: Tensor, window: int | None
) -> _Decodes:
    lens, size = [metadata.seq_lens[i] for i in members], metadata.block_size
    first_blocks = [0 if window is None else max(0, length - window) // size for length in lens]
    num_blocks = max(-(-length // size) - first for length, first in zip(lens, first_blocks, strict=True))
    device = like.device
    first = torch.tensor(first_blocks, device=device)[:, None]  # [B, 1]
    columns = first + torch.arange(num_blocks, device=device)  # [B, blocks]; some are beyond the end of the table
    positions = first * size + torch.arange(num_blocks * size, device=device)  # [B, L]
    seq_lens = torch.tensor(lens, device=device)[:, None]
    visible = positions < seq_lens
    if window is not None:
        visible &= positions >= seq_lens - window
    tables = metadata.block_tables[members]
    return _Decodes(
        rows=torch.tensor([starts[i] for i in members], device=device),
        blocks=tables.gather(1, columns.clamp(max=tables.shape[1] - 1)).flatten(),
        padding=(~visible).flatten().nonzero().squeeze(-1),
        mask=_additive(visible, like)[:, None, None],
    )


def _prefill(
    metadata: AttentionMetadata, starts: list[int], i: int, like: Tensor, variant: AttentionVariant
) -> _Prefill:
    query_len, seq_len, size, window = metadata.query_lens[i], metadata.seq_lens[i], metadata.block_size, variant.window
    earliest = 0 if window is None else max(0, seq_len - query_len + 1 - window)  # first position visible
    first_block = earliest // size
    positions = torch.arange(first_block * size, seq_len, device=like.device)
    queries = torch.arange(seq_len - query_len, seq_len, device=like.device)[:, None]
    visible = positions <= queries
    if window is not None:
        visible &= positions > queries - window
    is_supported = variant.softcap is None and variant.sinks is None  # by torch's kernel
    is_causal = query_len == seq_len and is_supported and (window is None or window >= seq_len)
    return _Prefill(
        rows=torch.arange(starts[i], starts[i + 1], device=like.device),
        blocks=metadata.block_tables[i, first_block : -(-seq_len // size)],
        num_keys=len(positions),
        mask=None if is_causal else _additive(visible, like),
    )


def _additive(visible: Tensor, like: Tensor) -> Tensor:
    """Returns a mask to add to scores: 0 where a position is visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)
