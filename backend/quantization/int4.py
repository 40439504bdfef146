"""Weights in four bits, one scale for each group of 32 along a row: 4.5 bits a weight.

The scale is the one, of several, that brings a group's numbers closest to it. A group's largest weight may lie at
either end of the numbers from -8 to 7, so scales of both signs are tried.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.engine.errors import WeightsError
from backend.ops.base import INT4_GROUP, Ops
from backend.ops.mixture import Weight
from backend.quantization.base import Linear, Quantization

LEAST, MOST = -8, 7
# Where a group's largest weight comes to lie. Beyond the ends it is cut, for the sake of the many near zero.
ENDS = (-7.0, -7.5, -8.0, -8.5, -9.0, 7.0, 7.5, 8.0, 8.5)


class Int4Linear(Linear):
    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._bias = bias
        self._gate = gate
        numbers, self._scales = pack(weight)
        self._weight = ops.pack_int4(numbers, self._scales, weight.dtype)

    @property
    def held(self) -> Weight:
        return Weight("int4", self._weight, self._scales, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gated(self._ops.linear_int4(x, self._weight, self._scales, self._bias), self._gate)


class Int4(Quantization):
    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        """Raises `WeightsError` for a weight whose rows are no whole number of groups."""
        if weight.shape[1] % INT4_GROUP:
            raise WeightsError(f"int4 needs inputs in multiples of {INT4_GROUP}, and a weight has {weight.shape[1]}")
        return Int4Linear(self.ops, weight, bias, gate)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> [out, in / 2] uint8 and [out, in / INT4_GROUP] bfloat16, as `Ops.linear_int4` takes them."""
    groups = weight.float().view(len(weight), -1, INT4_GROUP)  # [out, G, INT4_GROUP]
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))  # [out, G, 1], with its sign
    best_error = torch.full_like(largest, torch.inf)
    best_scale = torch.zeros_like(largest)
    for end in ENDS:
        scale = (largest / end).bfloat16().float()
        error = (_numbers(groups, scale) * scale - groups).square_().sum(dim=-1, keepdim=True)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
    numbers = (_numbers(groups, best_scale) - LEAST).to(torch.uint8)
    first, second = numbers.chunk(2, dim=-1)
    return (first | second << 4).flatten(1), best_scale.squeeze(-1).bfloat16()


def _numbers(groups: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale == 0.0, 0.0, 1.0 / scale)
    return (groups * inverse).round_().clamp_(LEAST, MOST)
