"""Inputs of a layer in one step: rotations, KV slots and attention, which all layers share, and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.attention.base import StepAttention
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.layers.lora import AdapterRows
from backend.ops.base import Ops


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer."""

    key: Tensor  # [num_blocks, block_size, Hkv, W], W is the format's width for head dimension D
    value: Tensor
    format: KvFormat = PLAIN

    def store(self, ops: Ops, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Encodes keys and values [T, Hkv, D] and stores them in slots [T]. Slots are numbered over all blocks."""
        ops.encode_and_store_kv(key, value, self.key, self.value, slots, self.format)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of every layer in one step. T is the number of tokens of the step, over all requests.

    In the last layer, only the keys and values of most prompt tokens are needed. `rows` then lists the W tokens whose
    attention and MLP output the layer computes.
    """

    rope: tuple[tuple[Tensor, Tensor], ...]  # (cos, sin) of each of the model's rope tables, [T, dim / 2] float32
    slot_mapping: Tensor  # [T] int64: slot of each token's key and value
    attend: StepAttention  # attention of the W tokens
    rows: Tensor | None = None  # [W] int64; None: all tokens
    adapters: AdapterRows | None = None  # of the T tokens
    kept_adapters: AdapterRows | None = None  # of the W tokens

    def select_rows(self, values: Tensor) -> Tensor:
        """Selects the tokens that the layer continues with: [T, ...] -> [W, ...]."""
        return values if self.rows is None else values.index_select(0, self.rows)
