"""Linear layer for checkpoints with weights in MXFP4, which it multiplies without loss of precision."""

from __future__ import annotations

from torch import Tensor

from backend.model_files.mxfp4 import SCALE_BIAS, Mxfp4Tensor
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Linear


class Mxfp4Linear(Linear):
    """Linear layer with a weight in MXFP4: four-bit floats with one scale per group of 32 along a row."""

    def __init__(self, ops: Ops, weight: Mxfp4Tensor, bias: Tensor | None, gate: str | None) -> None:
        """weight: [out, in]"""
        self._ops = ops
        self._bias = bias
        self._gate = gate
        self._scales = weight.scales(SCALE_BIAS + 1).bfloat16()  # half, because `Ops.linear_mxfp4` doubles the values
        self._weight = ops.pack_int4(weight.codes, self._scales, weight.dtype)

    @property
    def packed_weight(self) -> LinearWeight:
        return LinearWeight("mxfp4", self._weight, self._scales, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gated(self.ungated(x), self._gate)

    def ungated(self, x: Tensor) -> Tensor:
        return self._ops.linear_mxfp4(x, self._weight, self._scales, self._bias)
