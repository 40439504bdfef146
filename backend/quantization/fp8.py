"""Quantization `fp8`: weights in e4m3 with one scale per output, for tensor cores that multiply fp8.

Inputs are also rounded to fp8, with one scale per row. So reading a weight costs half as much as in bfloat16, and a
large matrix multiplication takes half the time. With int8, large matrix multiplications are not faster here. A mixture
of experts on a GPU does not multiply in fp8: it reads the weights in fp8 and does not round its inputs.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from backend.ops.base import Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Linear, Quantization
from backend.quantization.none import PlainLinear

MULTIPLE = 16  # torch's fp8 multiplication requires inputs and outputs in multiples of this


class Fp8Linear(Linear):
    """Linear layer with a weight in fp8, computed by fp8 tensor cores."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._bias = bias
        self._gate = gate
        self._input_gate: str | None = None  # of the layer before this one, which leaves it to this one
        self._weight, self._scales = ops.round_to_fp8(weight)

    @property
    def packed_weight(self) -> LinearWeight:
        return LinearWeight("fp8", self._weight, self._scales.squeeze(1), self._bias, self._gate)

    def pass_gate_to(self, following: Linear) -> tuple[Linear, Linear]:
        """With the gate and the rounding of its result in one kernel."""
        if self._gate is None or not isinstance(following, Fp8Linear):
            return self, following
        ungated, gating = copy(self), copy(following)
        ungated._gate, gating._input_gate = None, self._gate
        return ungated, gating

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gated(self.ungated(x), self._gate)

    def ungated(self, x: Tensor) -> Tensor:
        gate, ops = self._input_gate, self._ops
        return self._multiply(*(ops.gate_round_to_fp8(x, gate) if gate else ops.round_to_fp8(x)), x.dtype)

    def after_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """With the norm and the rounding of its result in one kernel."""
        values, scales, total = self._ops.norm_round_to_fp8(x, residual, weight, eps)
        return self._ops.gated(self._multiply(values, scales, x.dtype), self._gate), total

    def _multiply(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        product = torch._scaled_mm(
            values, self._weight.t(), scale_a=scales, scale_b=self._scales.t(), out_dtype=torch.bfloat16
        ).to(dtype)
        return product if self._bias is None else product + self._bias


class Fp8(Quantization):
    """Quantizes weights to fp8. A weight of a shape that torch cannot multiply in fp8 stays in the model's dtype."""

    bits = 8.0

    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            return PlainLinear(self.ops, weight, bias, gate)
        return Fp8Linear(self.ops, weight, bias, gate)
