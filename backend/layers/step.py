from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.attention.base import StepAttention


@dataclass(frozen=True, slots=True)
class LayerCache:
    key: Tensor  # [num_blocks, block_size, Hkv, D]
    value: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one step needs to know. T tokens, over all requests."""

    rope: tuple[tuple[Tensor, Tensor], ...]  # of each of the model's tables: cos and sin, [T, dim / 2] float32
    slot_mapping: Tensor  # [T] int64: where each token's key and value go
    attend: StepAttention
