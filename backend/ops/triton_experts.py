"""Mixture of experts by the kernels of triton_expert_kernels.py, without a host sync, so CUDA graphs can capture it.

An assignment is one (token, chosen expert) pair. The assignment of a token to its k-th expert has the number
`token * K + k`, out of T * K. `group_by_expert` sorts the assignments of a step into blocks of one expert each. Every
linear layer runs over these blocks.
"""

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

FORMATS = frozenset({"plain", "int8", "int4", "fp8"})  # weight formats that the kernels read
BLOCK_ASSIGNMENTS = 512  # assignments that a program searches at once for one expert
BLOCK_SUMS = 1024  # maximum elements of a token's output that one program computes


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of the tile of a matrix multiplication that one program computes, and its number of prefetch stages."""

    assignments: int
    outs: int
    inputs: int
    stages: int


# A row's sums must be the same in all tiles of a dtype, with inputs added from the first to the last. So tiles have
# fewer than 64 rows. With 64 rows, Hopper would use other instructions, which add in another order.
FEW = {torch.bfloat16: Tile(16, 64, 64, 6), torch.float32: Tile(16, 32, 64, 2)}
MANY = {torch.bfloat16: Tile(32, 128, 64, 4), torch.float32: Tile(16, 32, 64, 2)}


def route(scores: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Computes `Ops.route` by a Triton kernel."""
    scores = whole_rows(scores)
    rows, num_experts = scores.shape
    weights = scores.new_empty((rows, num_chosen), dtype=torch.float32)
    chosen = scores.new_empty((rows, num_chosen), dtype=torch.int64)
    kernels.route[(rows,)](
        scores, weights, chosen, scores.stride(0),
        NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen, NORMALISE=normalise,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(num_chosen), num_warps=1,
    )  # fmt: skip
    return weights, chosen


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Assignments of a step in blocks of one expert each. The number of blocks is the maximum that can be needed."""

    experts: Tensor  # [blocks] int32: the expert of each block; -1 for an unused block
    assignments: Tensor  # [blocks, size] int32; -1 for padding, and undefined in unused blocks


def group_by_expert(chosen: Tensor, num_experts: int, size: int) -> ExpertBlocks:
    """Sorts assignments into blocks of `size`. `chosen`, [T, K], must be contiguous."""
    num_assignments = chosen.numel()
    # Each chosen expert has at most one block that is not full, with at least one assignment in it.
    num_blocks = (num_assignments + min(num_assignments, num_experts) * (size - 1)) // size
    counts, experts = (chosen.new_empty(length, dtype=torch.int32) for length in (num_experts, num_blocks))
    assignments = chosen.new_empty((num_blocks, size), dtype=torch.int32)
    kernels.count_assignments[(num_experts,)](chosen, counts, num_assignments, BLOCK=BLOCK_ASSIGNMENTS)
    kernels.group_assignments[(num_blocks,)](
        chosen, counts, assignments, experts, num_assignments,
        NUM_EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=size, BLOCK=BLOCK_ASSIGNMENTS,
    )  # fmt: skip
    return ExpertBlocks(experts, assignments)


class TritonMixtureOfExperts(MixtureOfExperts):
    """Mixture of experts by Triton kernels.

    Copies the experts' weights, which must have one format, into one tensor for each of the two linear layers.
    """

    def __init__(self, experts: Sequence[tuple[LinearWeight, LinearWeight]]) -> None:
        first, second = zip(*experts, strict=True)
        self._first, self._second = _StackedProduct(first), _StackedProduct(second)
        self._num_experts = len(experts)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        x, weights, chosen = whole_rows(x), weights.contiguous(), chosen.contiguous()
        (num_tokens, size), num_chosen = x.shape, chosen.shape[1]
        few, many = FEW[x.dtype], MANY[x.dtype]
        tile = few if chosen.numel() <= self._num_experts * few.assignments else many
        blocks = group_by_expert(chosen, self._num_experts, tile.assignments)
        inner = self._first(x, num_chosen, blocks, tile, x.dtype)
        results = self._second(inner, 1, blocks, tile, torch.float32)
        output = x.new_empty(x.shape)
        block = min(BLOCK_SUMS, triton.next_power_of_2(size))
        kernels.combine[num_tokens, triton.cdiv(size, block)](
            results, weights, chosen, output, size,
            NUM_CHOSEN=num_chosen, BLOCK_K=triton.next_power_of_2(num_chosen), BLOCK=block,
        )  # fmt: skip
        return output


class _StackedProduct:
    """One of the two linear layers of all experts."""

    def __init__(self, weights: Sequence[LinearWeight]) -> None:
        self._format, self._gate = weights[0].format, weights[0].gate
        values = torch.stack([weight.values for weight in weights])  # [experts, out, ...]
        self._values = values.view(torch.uint8) if self._format == "fp8" else values
        self._scales = _stacked([weight.scales for weight in weights])
        self._bias = _stacked([weight.bias for weight in weights])

    def __call__(
        self, x: Tensor, assignments_per_row: int, blocks: ExpertBlocks, tile: Tile, dtype: torch.dtype
    ) -> Tensor:
        """Computes the layer for all assignments: x [N, in] -> [N * assignments_per_row, out].

        With a gate, the result has out / 2 columns.
        """
        outs = self._values.shape[1]
        output = x.new_empty((len(x) * assignments_per_row, outs // 2 if self._gate else outs), dtype=dtype)
        kernels.expert_product[len(blocks.experts), triton.cdiv(outs, tile.outs)](
            x, self._values, self._scales, self._bias, output, blocks.assignments, blocks.experts,
            outs, x.shape[1], x.stride(0),
            ASSIGNMENTS=assignments_per_row, FORMAT=self._format, GATE=self._gate, HAS_BIAS=self._bias is not None,
            OPERANDS=operands(x.dtype), BLOCK_M=tile.assignments, BLOCK_N=tile.outs,
            BLOCK_K=INT4_GROUP if self._format == "int4" else tile.inputs, num_stages=tile.stages,
        )  # fmt: skip
        return output


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given) if given else None
