"""Weights made numbers of four bits, as `Ops.linear_int4` takes them, by torch.

The scale of a group is the one, of several, that brings its numbers closest to it. A group's largest weight may lie at
either end of the numbers from -8 to 7, so scales of both signs are tried.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.ops.base import INT4_GROUP

LEAST, MOST = -8, 7
# Where a group's largest weight comes to lie. Beyond the ends it is cut, for the sake of the many near zero.
ENDS = (-7.0, -7.5, -8.0, -8.5, -9.0, 7.0, 7.5, 8.0, 8.5)


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> [out, in / 2] uint8 and [out, in / INT4_GROUP] bfloat16."""
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
