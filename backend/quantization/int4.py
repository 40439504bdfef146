"""Quantization `int4`: weights in four bits with one scale per group of 32 along a row, 4.5 bits per weight."""

from __future__ import annotations

from torch import Tensor

from backend.engine.errors import WeightsError
from backend.ops.base import INT4_GROUP, Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Linear, Quantization


class Int4Linear(Linear):
    """Linear layer with a weight in int4."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._bias = bias
        self._gate = gate
        values, self._scales = ops.to_int4(weight)
        self._weight = ops.pack_int4(values, self._scales, weight.dtype)

    @property
    def packed_weight(self) -> LinearWeight:
        return LinearWeight("int4", self._weight, self._scales, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gated(self.ungated(x), self._gate)

    def ungated(self, x: Tensor) -> Tensor:
        return self._ops.linear_int4(x, self._weight, self._scales, self._bias)


class Int4(Quantization):
    """Quantizes all weights to int4."""

    bits = 4.5

    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        """Quantizes a weight to int4. Raises `WeightsError` if a row's length is not a multiple of the group size."""
        if weight.shape[1] % INT4_GROUP:
            raise WeightsError(f"int4 needs inputs in multiples of {INT4_GROUP}, but a weight has {weight.shape[1]}")
        return Int4Linear(self.ops, weight, bias, gate)
