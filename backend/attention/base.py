"""The port of the attention family.

A step holds S sequences with T new tokens in all, one after the other: whole prompts, chunks of prompts and single
decode tokens side by side. The new tokens' keys and values are in the cache before attention looks at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    query_lens: tuple[int, ...]  # of each sequence, how many tokens are new; at least 1
    seq_lens: tuple[int, ...]  # of each sequence, how many tokens are in the cache, the new ones included
    kv_lens: Tensor  # [S] int32: the same, where the caches are
    cu_seqlens_q: Tensor  # [S + 1] int32: where each sequence's new tokens begin
    block_tables: Tensor  # [S, max_blocks] int32, padded with block 0
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """What one layer sees, and how sharply."""

    window: int | None = None  # the last so many tokens, itself included; None: all
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    # [Hq] float32: a score for each head that takes part in the softmax, and has no value. No part of what spans are
    # compared by: what is worked out for one layer serves all with the same window.
    sinks: Tensor | None = field(default=None, compare=False)


FULL_ATTENTION = AttentionVariant()


class StepAttention(ABC):
    """Attention as every layer of one step uses it."""

    @abstractmethod
    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, span: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        """query: [T, Hq, D]; caches: [num_blocks, block_size, Hkv, W] -> [T, Hq, D]. W is D, but in a quantised cache.

        A sequence's i-th new token sees the cached tokens up to and including itself, as far back as the span goes,
        and nothing else: neither other sequences nor what an unfilled or reused block happens to hold.
        """


class Attention(ABC):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        """Works out once per step what all layers share, for queries of `like`'s dtype and device."""
