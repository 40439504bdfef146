"""Weights in eight-bit floats (e4m3), one scale for each output, for tensor cores that multiply such numbers.

Inputs are rounded to the same form, with a scale for each row. So reading the weight costs half of what bfloat16 costs,
and so do large products, which eight-bit integers do not make faster here. A mixture of experts on a GPU has no such
products: it reads the weights so, and leaves its inputs as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.ops.base import Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Linear, Quantization
from backend.quantization.none import PlainLinear

FORM = torch.float8_e4m3fn
LARGEST = torch.finfo(FORM).max
SMALLEST_SCALE = 1e-30  # of a row of zeros, which then stays one
MULTIPLE = 16  # that the products take of inputs and outputs


class Fp8Linear(Linear):
    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._bias = bias
        self._gate = gate
        self._weight, self._scales = _rounded(weight)

    @property
    def held(self) -> LinearWeight:
        return LinearWeight("fp8", self._weight, self._scales.squeeze(1), self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = _rounded(x)
        product = torch._scaled_mm(
            numbers, self._weight.t(), scale_a=scales, scale_b=self._scales.t(), out_dtype=torch.bfloat16
        ).to(x.dtype)
        return self._ops.gated(product if self._bias is None else product + self._bias, self._gate)


class Fp8(Quantization):
    """Weights whose shape the products do not take stay as they are."""

    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            return PlainLinear(self.ops, weight, bias, gate)
        return Fp8Linear(self.ops, weight, bias, gate)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, D] -> the same in e4m3, contiguous, and the scales: [N, 1] float32."""
    scales = (rows.abs().amax(dim=1, keepdim=True).float() / LARGEST).clamp_(min=SMALLEST_SCALE)
    return (rows.float() / scales).to(FORM), scales
