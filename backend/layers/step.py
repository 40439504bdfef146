from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.attention.base import StepAttention
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.ops.base import Ops


@dataclass(frozen=True, slots=True)
class LayerCache:
    key: Tensor  # [num_blocks, block_size, Hkv, W], W being the form's width for the head's D
    value: Tensor
    form: KvFormat = PLAIN

    def store(self, ops: Ops, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """key, value: [T, Hkv, D]; slots: [T], over all blocks."""
        ops.store_kv(self.form.encode(key), self.form.encode(value), self.key, self.value, slots)


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one step needs to know. T tokens, over all requests."""

    rope: tuple[tuple[Tensor, Tensor], ...]  # of each of the model's tables: cos and sin, [T, dim / 2] float32
    slot_mapping: Tensor  # [T] int64: where each token's key and value go
    attend: StepAttention  # for the tokens that a layer goes on with
    rows: Tensor | None = None  # [W] int64: these, once it has stored keys and values; None: all

    def going_on(self, values: Tensor) -> Tensor:
        """[T, ...] -> [W, ...]"""
        return values if self.rows is None else values.index_select(0, self.rows)
