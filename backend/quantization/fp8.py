"""Weights in fp8 (e4m3) with one scale per output, for tensor cores that multiply fp8.

Inputs are rounded to fp8, too, with one scale per row. So reading a weight costs half of what it costs in bfloat16, and
so do large products; int8 does not make large products faster here. A mixture of experts on a GPU has no fp8 products:
it reads the weights in fp8 and leaves its inputs as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.ops.base import Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Linear, Quantization
from backend.quantization.none import PlainLinear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = 1e-30  # for a row of zeros, which stays zeros
MULTIPLE = 16  # of inputs and outputs, that torch's fp8 products require


class Fp8Linear(Linear):
    """A weight in fp8, multiplied by fp8 tensor cores."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._bias = bias
        self._gate = gate
        self._weight, self._scales = _quantised(weight)

    @property
    def packed_weight(self) -> LinearWeight:
        return LinearWeight("fp8", self._weight, self._scales.squeeze(1), self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = _quantised(x)
        product = torch._scaled_mm(
            values, self._weight.t(), scale_a=scales, scale_b=self._scales.t(), out_dtype=torch.bfloat16
        ).to(x.dtype)
        return self._ops.gated(product if self._bias is None else product + self._bias, self._gate)


class Fp8(Quantization):
    """Weights in fp8. A weight whose shape the products do not support stays in the model's dtype."""

    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            return PlainLinear(self.ops, weight, bias, gate)
        return Fp8Linear(self.ops, weight, bias, gate)


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows to e4m3. [N, D] -> [N, D] e4m3, contiguous, and scales [N, 1] float32."""
    scales = (rows.abs().amax(dim=1, keepdim=True).float() / LARGEST).clamp_(min=SMALLEST_SCALE)
    return (rows.float() / scales).to(FP8), scales
