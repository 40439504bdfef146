"""Quantization `none`: weights stay as in the checkpoint, if the kernels can multiply them in its format."""

from __future__ import annotations

from torch import Tensor

from backend.model_files.gguf_blocks import BlockTensor
from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.model_files.quantized_tensor import StoredTensor
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight
from backend.quantization.base import Embedding, Linear, Quantization, TableEmbedding
from backend.quantization.blocks import BlockEmbedding, BlockLinear, can_pack
from backend.quantization.mxfp4 import Mxfp4Linear


class PlainLinear(Linear):
    """Linear layer with a weight in the model's dtype, packed for the kernels."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self._ops = ops
        self._weight = ops.pack(weight, weight.dtype, gate)
        self._bias = bias
        self._gate = gate

    @property
    def packed_weight(self) -> LinearWeight:
        return LinearWeight("plain", self._weight, None, self._bias, self._gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._weight, self._bias, self._gate)

    def ungated(self, x: Tensor) -> Tensor:
        bias = self._ops.to_packed_order(self._bias, self._weight, self._gate)
        return self._ops.from_packed_order(self._ops.linear(x, self._weight, bias), self._weight, self._gate)

    def after_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        return self._ops.norm_linear(x, residual, weight, eps, self._weight, self._bias, self._gate)

    def tied_embedding(self) -> Embedding:
        return TableEmbedding(self._ops, self._weight)


class Unquantized(Quantization):
    """Does not quantize weights. Weights in MXFP4 and of GGUF files stay quantized if `Ops` multiplies them fast."""

    def linear(self, weight: StoredTensor, bias: Tensor | None, gate: str | None = None) -> Linear:
        if isinstance(weight, Mxfp4Tensor) and self.ops.reads_mxfp4:
            return Mxfp4Linear(self.ops, weight, bias, gate)
        if isinstance(weight, BlockTensor) and can_pack(self.ops, weight):
            return BlockLinear(self.ops, weight, bias, gate)
        return super().linear(weight, bias, gate)

    def embedding(self, weight: StoredTensor) -> Embedding:
        if isinstance(weight, BlockTensor) and can_pack(self.ops, weight):
            ((name, blocks),) = weight.by_kind()  # as it is in the file
            return BlockEmbedding(self.ops, self.ops.pack_blocks(blocks, name, weight.shape[1]))
        return super().embedding(weight)

    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        return PlainLinear(self.ops, weight, bias, gate)
