"""Tensors in MXFP4, a format of four bits per number: OCP Microscaling Formats, version 1.0, section 5.3.

32 adjacent numbers of a row form a group and share a scale, a power of two. Each number has a sign bit, two exponent
bits and one mantissa bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.model_files.quantized_tensor import QuantizedTensor

GROUP = 32
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127
NO_SCALE = 255  # all numbers of the group are NaN


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor(QuantizedTensor):
    """Tensor of shape [..., in] in MXFP4."""

    codes: Tensor  # [..., in / 2] uint8: the first half of a group in the low four bits, the second half in the high
    exponents: Tensor  # [..., in / GROUP] uint8
    dtype: torch.dtype = torch.float32  # dtype of the dequantized tensor

    @classmethod
    def from_adjacent_pairs(cls, blocks: Tensor, exponents: Tensor) -> Mxfp4Tensor:
        """Converts blocks [..., in / GROUP, GROUP / 2] in which adjacent numbers share a byte."""
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        first, second = codes.chunk(2, dim=-1)
        return cls((first | second << 4).flatten(-2), exponents)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def __getitem__(self, places: int | slice) -> Mxfp4Tensor:
        return replace(self, codes=self.codes[places], exponents=self.exponents[places])

    def to(self, device: torch.device, dtype: torch.dtype) -> Mxfp4Tensor:
        return Mxfp4Tensor(self.codes.to(device), self.exponents.to(device), dtype)

    def scales(self, bias: int = SCALE_BIAS) -> Tensor:
        """Returns the scales of the groups: powers of two, [..., in / GROUP] float32."""
        ones = torch.ones_like(self.exponents, dtype=torch.float32)
        powers = torch.ldexp(ones, self.exponents.to(torch.int32) - bias)
        return powers.masked_fill_(self.exponents == NO_SCALE, torch.nan)

    def dequantize(self) -> Tensor:
        groups = self.codes.reshape(*self.codes.shape[:-1], -1, GROUP // 2)
        numbers = torch.tensor(NUMBERS, device=groups.device)[torch.cat((groups & 15, groups >> 4), dim=-1).int()]
        return numbers.mul_(self.scales()[..., None]).to(self.dtype).flatten(-2)

    @classmethod
    def concatenate(cls, parts: Sequence[Mxfp4Tensor]) -> Mxfp4Tensor:
        codes, exponents = torch.cat([part.codes for part in parts]), torch.cat([part.exponents for part in parts])
        return cls(codes, exponents, parts[0].dtype)
