"""Quantizes weights to int4 with torch, in the layout of `Ops.linear_int4`.

For each group, several scales are tried, and the scale with the smallest squared error is selected. A group's largest
weight may be mapped to either end of the range from -8 to 7, so scales of both signs are tried.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.ops.base import INT4_GROUP

LEAST, MOST = -8, 7
# The numbers that a group's largest weight is mapped to. A number beyond the range is clipped. That can reduce the
# error of the many weights near zero.
SCALE_ENDS = (-7.0, -7.5, -8.0, -8.5, -9.0, 7.0, 7.5, 8.0, 8.5)


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a weight [out, in] to codes [out, in / 2] uint8 and scales [out, in / INT4_GROUP] bfloat16."""
    groups = weight.float().view(len(weight), -1, INT4_GROUP)  # [out, G, INT4_GROUP]
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))  # [out, G, 1], with its sign
    best_error = torch.full_like(largest, torch.inf)
    best_scale = torch.zeros_like(largest)
    for end in SCALE_ENDS:
        scale = (largest / end).bfloat16().float()
        error = (_rounded(groups, scale) * scale - groups).square_().sum(dim=-1, keepdim=True)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
    codes = (_rounded(groups, best_scale) - LEAST).to(torch.uint8)
    first, second = codes.chunk(2, dim=-1)
    return (first | second << 4).flatten(1), best_scale.squeeze(-1).bfloat16()


def _rounded(groups: Tensor, scale: Tensor) -> Tensor:
    """Returns groups / scale, rounded to integers and limited to the range from LEAST to MOST."""
    inverse = torch.where(scale == 0.0, 0.0, 1.0 / scale)
    return (groups * inverse).round_().clamp_(LEAST, MOST)
