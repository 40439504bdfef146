"""One byte for each number, and a scale for each token and head: about half of bfloat16.

The scale stands behind the bytes in the same row, so that whatever moves rows moves it too.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from backend.kv_cache.base import KvFormat

SCALE_BYTES = 4  # float32
SMALLEST_SCALE = 1e-30  # of a vector of zeros, which then stays one


class _ScaledFormat(KvFormat):
    limit: float  # the largest number that a byte holds

    @abstractmethod
    def _to_bytes(self, values: Tensor) -> Tensor:
        """float32 between -limit and limit -> int8, bit by bit what the form holds."""

    @abstractmethod
    def _from_bytes(self, values: Tensor) -> Tensor:
        """The other way round."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.int8

    def width(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def head_dim(self, width: int) -> int:
        return width - SCALE_BYTES

    def encode(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        scales = (vectors.abs().amax(-1, keepdim=True) / self.limit).clamp_(min=SMALLEST_SCALE)
        return torch.cat((self._to_bytes(vectors / scales), scales.view(torch.int8)), dim=-1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        values, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
        return (self._from_bytes(values) * scales.contiguous().view(torch.float32)).to(dtype)


class Int8Format(_ScaledFormat):
    name = "int8"
    limit = 127.0

    def _to_bytes(self, values: Tensor) -> Tensor:
        return values.round().to(torch.int8)

    def _from_bytes(self, values: Tensor) -> Tensor:
        return values.float()


class Fp8Format(_ScaledFormat):
    """Four bits of exponent and three of mantissa: small numbers keep their precision beside large ones."""

    name = "fp8_e4m3"
    limit = torch.finfo(torch.float8_e4m3fn).max

    def _to_bytes(self, values: Tensor) -> Tensor:
        return values.to(torch.float8_e4m3fn).view(torch.int8)

    def _from_bytes(self, values: Tensor) -> Tensor:
        return values.contiguous().view(torch.float8_e4m3fn).float()
