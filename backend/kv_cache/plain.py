"""KV cache format that stores keys and values unquantised, in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.kv_cache.base import KvFormat


class PlainFormat(KvFormat):
    """Stores keys and values in the model's dtype, without quantisation."""

    name = "auto"

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def width(self, head_dim: int) -> int:
        return head_dim

    def head_dim(self, width: int) -> int:
        return width

    def encode(self, vectors: Tensor) -> Tensor:
        return vectors

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return rows


PLAIN = PlainFormat()
