"""Quantization `int8`: weights in int8 with one scale per output, half the memory and memory traffic of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.ops.base import Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Linear, Quantization

MAX_VALUE = 127


class Int8Linear(Linear):
    """Linear layer with a weight in int8."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._bias = bias
        self._gate = gate
        wide = weight.to(torch.float32, copy=True)  # a copy: a tied weight is also the embedding
        self._scales = wide.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / MAX_VALUE  # [out]
        self._weight = ops.pack(wide.div_(self._scales[:, None]).round_().to(torch.int8), weight.dtype, gate)

    @property
    def packed_weight(self) -> LinearWeight:
        return LinearWeight("int8", self._weight, self._scales, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear_int8(x, self._weight, self._scales, self._bias, self._gate)

    def ungated(self, x: Tensor) -> Tensor:
        scales = self._ops.to_packed_order(self._scales, self._weight, self._gate)
        bias = self._ops.to_packed_order(self._bias, self._weight, self._gate)
        product = self._ops.linear_int8(x, self._weight, scales, bias)
        return self._ops.from_packed_order(product, self._weight, self._gate)


class Int8(Quantization):
    """Quantizes all weights to int8."""

    bits = 8.0

    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        return Int8Linear(self.ops, weight, bias, gate)
