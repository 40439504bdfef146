"""Interface of attention implementations: `Attention.prepare` once per step, then `StepAttention` once per layer.

A step processes S sequences with T new tokens in all, stored one sequence after the other. A sequence's new tokens can
be a complete prompt, a chunk of a prompt or a single decode token. The layer writes the keys and values of the new
tokens to the cache before attention reads the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What a captured step computes, in buffers of fixed sizes on the device.

    The kernels' launches depend on the sizes only, so a graph of them can be replayed for any step that fits.
    """

    decodes: Tensor  # [N] int32: the sequences with one new token; -1 if an entry is unused
    tiles: Tensor  # [M, 2] int32: tiles of the other sequences: the sequence and its first token; -1 if unused
    longest: int  # new tokens that a sequence can have; `Attention.tile_tokens` of it is a tile's length


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Describes where the new and the cached tokens of each sequence of a step are.

    With `work`, kernels on a GPU read the lengths on the device only, and ignore `query_lens` and `seq_lens`.
    """

    query_lens: tuple[int, ...]  # number of new tokens of each sequence, at least 1
    seq_lens: tuple[int, ...]  # number of tokens of each sequence in the cache, including the new ones
    kv_lens: Tensor  # [S] int32: `seq_lens` on the device of the caches
    cu_seqlens_q: Tensor  # [S + 1] int32: where the new tokens of each sequence begin
    block_tables: Tensor  # [S, max_blocks] int32, padded with block 0
    block_size: int
    work: AttentionWork | None = None


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """Options of one layer's attention: sliding window, softcap and sinks. The default is full causal attention."""

    window: int | None = None  # sliding window in tokens, including the token itself; None: all tokens before it
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    # [Hq] float32: an additional score per head that takes part in the softmax, but has no value. Comparisons ignore
    # it, because layers with the same window share what `StepAttention` computes for that window.
    sinks: Tensor | None = field(default=None, compare=False)


FULL_ATTENTION = AttentionVariant()


class StepAttention(ABC):
    """Attention of one step. Each layer calls it with its own queries and caches."""

    @abstractmethod
    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        """Computes the attention of one layer: query [T, Hq, D] -> [T, Hq, D].

        Caches: [num_blocks, block_size, Hkv, W]. W is D unless the cache is quantised. A new token attends to the
        cached tokens of its sequence up to and including itself, within the variant's window. An implementation must
        read neither other sequences nor the old content of a block that is only partly filled.
        """


class Attention(ABC):
    """Base class of attention implementations. Attention scores are multiplied by `scale`."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        """Computes what all layers of a step share and returns the step's attention.

        The queries will have the dtype and device of `like`.
        """

    def tile_tokens(self, longest: int, num_heads: int, num_kv_heads: int, like: Tensor) -> int:
        """How many new tokens of one sequence a tile of `AttentionWork` has, if a sequence has up to `longest`."""
        return longest

    def warm_up_lengths(self, longest: int, like: Tensor) -> list[int]:
        """Lengths of prompts, up to `longest`, that must be computed once before a request may not wait for them."""
        return []
