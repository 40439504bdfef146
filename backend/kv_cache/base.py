"""Interface of KV cache formats: encodes keys and values to rows of the cache, and decodes the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class KvFormat(ABC):
    """Format of the KV cache. A key or value is stored as a row of `width` elements for each token and head.

    An implementation must encode each row independently: the row of a token depends on that token only. So blocks can
    be copied, shared and reused in every format, and a request's output depends neither on its batch nor on how its
    prompt was chunked. A row of zeros must decode to a vector of zeros.
    """

    name: ClassVar[str]  # its key in `KV_FORMATS`
    scales_apart = False  # whether blocks have another layout: all numbers first, then all scales
    limit: ClassVar[float] = 1.0  # of a quantised format: the largest number that one element can represent

    @abstractmethod
    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the cache for a model's dtype."""

    @abstractmethod
    def width(self, head_dim: int) -> int:
        """Returns the number of elements in a row for a head dimension."""

    @abstractmethod
    def head_dim(self, width: int) -> int:
        """Returns the head dimension for a row's number of elements. Inverse of `width`."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """Encodes vectors to rows: [..., head_dim] -> [..., width]."""

    @abstractmethod
    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes rows to vectors in `dtype`: [..., width] -> [..., head_dim].

        May return `rows` itself. So a caller must pass a copy of a cache's rows, not the cache.
        """

    def with_scales_apart(self) -> KvFormat:
        """Returns the format with `scales_apart`, or itself if it has no scales."""
        return self

    def load(self, cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes whole blocks of a cache [num_blocks, block_size, H, width]: blocks [B] -> [B * block_size, H, D]."""
        return self.decode(cache.index_select(0, blocks).flatten(0, 1), dtype)

    def store(self, vectors: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Encodes vectors [T, H, D] and writes them to their slots [T] in a cache, in every layout of blocks."""
        cache.flatten(0, 1)[slots] = self.encode(vectors)
