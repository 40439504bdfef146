"""Layers with weights in the block types of GGUF files, which are multiplied as they are."""

from __future__ import annotations

from torch import Tensor

from backend.model_files.gguf_blocks import BlockTensor
from backend.ops.base import Ops, PackedBlocks
from backend.ops.experts import LinearWeight
from backend.quantization.base import Embedding, Linear


def can_pack(ops: Ops, weight: BlockTensor) -> bool:
    """Whether `ops` multiplies all parts of this weight as they are."""
    is_on_cpu = weight.device.type == "cpu"
    return is_on_cpu and all(
        ops.packs_blocks(name, sum(map(len, blocks)), weight.dtype) for name, blocks in weight.by_kind()
    )


class BlockLinear(Linear):
    """Linear layer with a weight in block types: as many parts as adjacent rows differ in type."""

    def __init__(self, ops: Ops, weight: BlockTensor, bias: Tensor | None, gate: str | None) -> None:
        """weight: one for which `can_pack` is true."""
        self._ops = ops
        self._bias = bias
        # The kernels apply a gate only if one part has both the gates and what they multiply.
        parts = weight.by_kind()
        self._gate = gate if len(parts) == 1 else None
        self._later_gate = gate if self._gate is None else None
        ins = weight.shape[1]
        self._parts = [ops.pack_blocks(blocks, name, ins, self._gate) for name, blocks in parts]

    @property
    def packed_weight(self) -> LinearWeight | None:
        if len(self._parts) > 1:
            return None
        return LinearWeight(self._parts[0].kind, self._parts[0].values, None, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gated(self._ops.linear_blocks(x, self._parts, self._bias, self._gate), self._later_gate)

    def ungated(self, x: Tensor) -> Tensor:
        values = self._parts[0].values
        bias = self._ops.to_packed_order(self._bias, values, self._gate)
        return self._ops.from_packed_order(self._ops.linear_blocks(x, self._parts, bias), values, self._gate)

    def tied_embedding(self) -> Embedding:
        (part,) = self._parts
        return BlockEmbedding(self._ops, part)


class BlockEmbedding(Embedding):
    """Embedding with a weight in a block type. A row is dequantized when it is looked up."""

    def __init__(self, ops: Ops, weight: PackedBlocks) -> None:
        self._ops = ops
        self._weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return self._ops.embedding_blocks(ids, self._weight)
