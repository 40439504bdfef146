"""Weights that a checkpoint keeps in four bits: OCP Microscaling's MXFP4, version 1.0, section 5.3.

32 numbers share a power of two. Each has a sign, two bits of exponent and one of mantissa; two stand in a byte, the
first in its lower half.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks: [..., n, 16] uint8; scales: [..., n] uint8 -> [..., n * 32]."""
    numbers = torch.tensor(NUMBERS, dtype=dtype, device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., n, 32]
    exponents = scales.to(torch.int32)[..., None] - SCALE_BIAS
    return torch.ldexp(numbers[halves.int()], exponents).flatten(-2)
