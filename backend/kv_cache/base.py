from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class KvFormat(ABC):
    """The form of one key or value in the cache: a row of `width` elements for each token and head.

    A row stands for itself: what is stored of one token depends on that token alone. So blocks may be copied, shared
    and found again whatever the form, and a request's answer depends neither on its neighbours nor on its chunks.
    A row of zeros is a vector of zeros.
    """

    name: ClassVar[str]  # in `KV_FORMATS`

    @abstractmethod
    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Of the cache."""

    @abstractmethod
    def width(self, head_dim: int) -> int:
        """The elements of a row."""

    @abstractmethod
    def head_dim(self, width: int) -> int:
        """The other way round."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """[..., head_dim] -> [..., width]."""

    @abstractmethod
    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., width] -> [..., head_dim] in `dtype`. May be `rows` itself, where they are not the cache's own."""
