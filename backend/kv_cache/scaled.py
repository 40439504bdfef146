"""Quantised KV cache formats: one byte per number and one scale per token and head, about half the size of bfloat16.

The scale follows the bytes in the same row. So code that moves rows also moves their scales.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from backend.kv_cache.base import KvFormat

SCALE_BYTES = 4  # float32
SMALLEST_SCALE = 1e-30  # for a vector of zeros, which decodes to zeros


class _ScaledFormat(KvFormat):
    @abstractmethod
    def _to_bytes(self, values: Tensor) -> Tensor:
        """Converts float32 numbers between -limit and limit to the bit patterns of the format, as int8."""

    @abstractmethod
    def _from_bytes(self, values: Tensor) -> Tensor:
        """Converts bit patterns of the format to numbers. Inverse of `_to_bytes`."""

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
    """Stores keys and values as integers from -127 to 127 with a scale per row."""

    name = "int8"
    limit = 127.0

    def _to_bytes(self, values: Tensor) -> Tensor:
        return values.round().to(torch.int8)

    def _from_bytes(self, values: Tensor) -> Tensor:
        return values.float()


class Fp8Format(_ScaledFormat):
    """Stores keys and values as floats with four exponent bits and three mantissa bits, with a scale per row.

    Small numbers keep their relative precision in a row that also has large numbers.
    """

    name = "fp8_e4m3"
    limit = torch.finfo(torch.float8_e4m3fn).max

    def _to_bytes(self, values: Tensor) -> Tensor:
        return values.to(torch.float8_e4m3fn).view(torch.int8)

    def _from_bytes(self, values: Tensor) -> Tensor:
        return values.contiguous().view(torch.float8_e4m3fn).float()
