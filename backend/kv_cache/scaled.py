"""Quantised KV cache formats: one byte per number and one scale per token and head, about half the size of bfloat16.

On a CPU, the scale follows the bytes in the same row. So code that moves rows also moves their scales. A GPU reads 16
bytes at once if their address is a multiple of 16, which those of such rows are not. There, the scales are apart: a
block has the bytes of all its tokens, [block_size, H, D], and then the scales of all its tokens, [H, block_size]. In
both layouts, a block has the same size, and code that moves blocks also moves their scales.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from backend.kv_cache.base import KvFormat

SCALE_BYTES = 4  # float32
SMALLEST_SCALE = 1e-30  # for a vector of zeros, which decodes to zeros


class _ScaledFormat(KvFormat):
    def __init__(self, *, scales_apart: bool = False) -> None:
        self.scales_apart = scales_apart

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

    def with_scales_apart(self) -> KvFormat:
        return type(self)(scales_apart=True)

    def load(self, cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.scales_apart:
            return super().load(cache, blocks, dtype)
        values, scales = _parts(cache.index_select(0, blocks))
        factors = scales.contiguous().view(torch.float32).transpose(1, 2)  # [B, block_size, H, 1]
        return (self._from_bytes(values) * factors).to(dtype).flatten(0, 1)

    def store(self, vectors: Tensor, cache: Tensor, slots: Tensor) -> None:
        if not self.scales_apart:
            super().store(vectors, cache, slots)
            return
        rows, (values, scales) = self.encode(vectors), _parts(cache)
        blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
        values[blocks, offsets] = rows[..., :-SCALE_BYTES]
        scales[blocks, :, offsets] = rows[..., -SCALE_BYTES:]


def _parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes and scales of blocks that have them apart, as views: [B, block_size, H, D] and [B, H, block_size, 4].

    blocks: [B, block_size, H, W] int8.
    """
    num_blocks, block_size, heads, width = blocks.shape
    whole, num_values = blocks.view(num_blocks, -1), block_size * heads * (width - SCALE_BYTES)
    values = whole[:, :num_values].view(num_blocks, block_size, heads, width - SCALE_BYTES)
    return values, whole[:, num_values:].view(num_blocks, heads, block_size, SCALE_BYTES)


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
