"""Quantization `none`: weights stay in the model's dtype, or in MXFP4 if the kernels can multiply MXFP4."""

from __future__ import annotations

from torch import Tensor

from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Linear, Quantization
from backend.quantization.mxfp4 import Mxfp4Linear


class PlainLinear(Linear):
    """Linear layer with a weight in the model's dtype, packed for the kernels."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._weight = ops.pack(weight, weight.dtype, gate)
        self._bias = bias
        self._gate = gate

    @property
    def packed_weight(self) -> LinearWeight:
        return LinearWeight("plain", self._weight, None, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._weight, self._bias, self._gate)

    def tied_embedding(self, weight: Tensor) -> Tensor:
        return self._weight  # embedding and head share the packed weight, so it is in memory only once


class Unquantized(Quantization):
    """Does not quantize weights. A weight in MXFP4 stays in four bits if `Ops` multiplies MXFP4 fast."""

    def linear(self, weight: Tensor | Mxfp4Tensor, bias: Tensor | None, gate: str | None = None) -> Linear:
        if isinstance(weight, Mxfp4Tensor) and self.ops.reads_mxfp4:
            return Mxfp4Linear(self.ops, weight, bias, gate)
        return super().linear(weight, bias, gate)

    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        return PlainLinear(self.ops, weight, bias, gate)
