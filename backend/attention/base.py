"""The interface of the attention family.

A step has S sequences with T new tokens in all, one sequence after the other: whole prompts, chunks of prompts and
single decode tokens side by side. Keys and values of the new tokens are in the cache before attention reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of each sequence of a step are."""

    query_lens: tuple[int, ...]  # number of new tokens of each sequence, at least 1
    seq_lens: tuple[int, ...]  # number of tokens of each sequence in the cache, including the new ones
    kv_lens: Tensor  # [S] int32: the same on the device of the caches
    cu_seqlens_q: Tensor  # [S + 1] int32: where the new tokens of each sequence begin
    block_tables: Tensor  # [S, max_blocks] int32, padded with block 0
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """How the attention of one layer differs from full causal attention, which is the default."""

    window: int | None = None  # sliding window: a token sees so many tokens, including itself; None: all before it
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    # [Hq] float32: an additional score per head that takes part in the softmax, but has no value. Not compared: what is
    # computed once for a window serves all layers with that window.
    sinks: Tensor | None = field(default=None, compare=False)


FULL_ATTENTION = AttentionVariant()


class StepAttention(ABC):
    """Attention for all layers of one step."""

    @abstractmethod
    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        """query: [T, Hq, D]; caches: [num_blocks, block_size, Hkv, W] -> [T, Hq, D]. W is D unless quantised.

        The i-th new token of a sequence sees the cached tokens up to and including itself, within the variant's window,
        and nothing else: neither other sequences nor the old content of a block that is not filled yet.
        """


class Attention(ABC):
    """One implementation of attention. `scale` is multiplied with the scores."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        """Computes once per step what all layers share, for queries with the dtype and device of `like`."""
