"""The interface of the KV cache formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class KvFormat(ABC):
    """How one key or value is stored in the cache: as a row of `width` elements for each token and head.

    Rows are independent: what is stored for a token depends on that token only. So blocks can be copied, shared and
    reused in every format, and a request's answer depends neither on its batch nor on how its prompt was chunked.
    A row of zeros decodes to a vector of zeros.
    """

    name: ClassVar[str]  # in `KV_FORMATS`

    @abstractmethod
    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the cache."""

    @abstractmethod
    def width(self, head_dim: int) -> int:
        """The number of elements in a row."""

    @abstractmethod
    def head_dim(self, width: int) -> int:
        """The inverse of `width`."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """[..., head_dim] -> [..., width]."""

    @abstractmethod
    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., width] -> [..., head_dim] in `dtype`. May return `rows` itself, so they must not be a cache's own."""
