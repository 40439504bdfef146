from __future__ import annotations

from torch import Tensor

from backend.ops.base import Ops
from backend.ops.mixture import Weight
from backend.quantization.base import Linear, Quantization


class PlainLinear(Linear):
    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._weight = ops.pack(weight, weight.dtype, gate)
        self._bias = bias
        self._gate = gate

    @property
    def held(self) -> Weight:
        return Weight("plain", self._weight, None, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._weight, self._bias, self._gate)

    def embedding(self, weight: Tensor) -> Tensor:
        return self._weight  # once in memory


class Unquantized(Quantization):
    def linear(self, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Linear:
        return PlainLinear(self.ops, weight, bias, gate)
