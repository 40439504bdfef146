"""Mixtures of experts by the kernels of triton_expert_kernels.py, which a step can be captured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from backend.ops import triton_expert_kernels as kernels
from backend.ops.base import INT4_GROUP, whole_rows
from backend.ops.experts import LinearWeight, MixtureOfExperts
from backend.triton_runtime import operands

FORMS = frozenset({"plain", "int8", "int4", "fp8"})  # of weights, that the kernels read
BLOCK_VISITS = 512  # that are looked through at once for those of an expert
BLOCK_SUMS = 1024  # of a token's results, that are computed at once


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program multiplies at once: visits, outs, inputs; and how far it reads ahead."""

    visits: int
    outs: int
    inputs: int
    stages: int


# A row's sums must be the same in all tiles of a dtype, in which inputs are added from the first to the last. So tiles
# have fewer than 64 rows, for which Hopper would take other instructions, with sums in an order of their own.
FEW = {torch.bfloat16: Tile(16, 64, 64, 6), torch.float32: Tile(16, 32, 64, 2)}
MANY = {torch.bfloat16: Tile(32, 128, 64, 4), torch.float32: Tile(16, 32, 64, 2)}


def route(scores: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """As `Ops` has it."""
    scores = whole_rows(scores)
    rows, num_experts = scores.shape
    shares = scores.new_empty((rows, num_chosen), dtype=torch.float32)
    chosen = scores.new_empty((rows, num_chosen), dtype=torch.int64)
    kernels.route[(rows,)](
        scores, shares, chosen, scores.stride(0),
        NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen, NORMALISE=normalise,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(num_chosen), num_warps=1,
    )  # fmt: skip
    return shares, chosen


@dataclass(frozen=True, slots=True)
class Groups:
    """The visits of a step, by expert: in blocks, of which there are as many as there could be."""

    experts: Tensor  # [blocks] int32: to whom a block's visits are; -1 for nobody
    visits: Tensor  # [blocks, size] int32: `token * K + place`; -1 for none, and for nobody anything


def grouped(chosen: Tensor, num_experts: int, size: int) -> Groups:
    """In blocks of that size. chosen: [T, K], contiguous."""
    num_visits = chosen.numel()
    # Each expert that is visited has no more than one block that is not full, and in that at least one visit.
    num_blocks = (num_visits + min(num_visits, num_experts) * (size - 1)) // size
    counts, experts = (chosen.new_empty(length, dtype=torch.int32) for length in (num_experts, num_blocks))
    visits = chosen.new_empty((num_blocks, size), dtype=torch.int32)
    kernels.count_visits[(num_experts,)](chosen, counts, num_visits, BLOCK=BLOCK_VISITS)
    kernels.group_visits[(num_blocks,)](
        chosen, counts, visits, experts, num_visits,
        NUM_EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=size, BLOCK=BLOCK_VISITS,
    )  # fmt: skip
    return Groups(experts, visits)


class TritonMixtureOfExperts(MixtureOfExperts):
    """Of experts that are held alike. Their weights are copied, one tensor of each kind for all of them."""

    def __init__(self, experts: Sequence[tuple[LinearWeight, LinearWeight]]) -> None:
        first, second = zip(*experts, strict=True)
        self._first, self._second = _Stack(first), _Stack(second)
        self._num_experts = len(experts)

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        x, shares, chosen = whole_rows(x), shares.contiguous(), chosen.contiguous()
        (num_tokens, size), num_chosen = x.shape, chosen.shape[1]
        few, many = FEW[x.dtype], MANY[x.dtype]
        tile = few if chosen.numel() <= self._num_experts * few.visits else many
        groups = grouped(chosen, self._num_experts, tile.visits)
        inner = self._first(x, num_chosen, groups, tile, x.dtype)
        results = self._second(inner, 1, groups, tile, torch.float32)
        output = x.new_empty(x.shape)
        block = min(BLOCK_SUMS, triton.next_power_of_2(size))
        kernels.combine[num_tokens, triton.cdiv(size, block)](
            results, shares, chosen, output, size,
            NUM_CHOSEN=num_chosen, BLOCK_K=triton.next_power_of_2(num_chosen), BLOCK=block,
        )  # fmt: skip
        return output


class _Stack:
    """The same product of all experts."""

    def __init__(self, weights: Sequence[LinearWeight]) -> None:
        self._form, self._gate = weights[0].form, weights[0].gate
        numbers = torch.stack([weight.numbers for weight in weights])  # [experts, out, ...]
        self._numbers = numbers.view(torch.uint8) if self._form == "fp8" else numbers
        self._scales = _stacked([weight.scales for weight in weights])
        self._bias = _stacked([weight.bias for weight in weights])

    def __call__(self, x: Tensor, visits_of_row: int, groups: Groups, tile: Tile, dtype: torch.dtype) -> Tensor:
        """x: [N, in] -> [N * visits_of_row, out], or half as many with a gate."""
        outs = self._numbers.shape[1]
        output = x.new_empty((len(x) * visits_of_row, outs // 2 if self._gate else outs), dtype=dtype)
        kernels.visit[len(groups.experts), triton.cdiv(outs, tile.outs)](
            x, self._numbers, self._scales, self._bias, output, groups.visits, groups.experts,
            outs, x.shape[1], x.stride(0),
            VISITS=visits_of_row, FORM=self._form, GATE=self._gate, HAS_BIAS=self._bias is not None,
            OPERANDS=operands(x.dtype), BLOCK_M=tile.visits, BLOCK_N=tile.outs,
            BLOCK_K=INT4_GROUP if self._form == "int4" else tile.inputs, num_stages=tile.stages,
        )  # fmt: skip
        return output


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given) if given else None
