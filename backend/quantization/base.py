"""Interface of quantizations: `Quantization.linear` creates a `Linear` layer from a checkpoint's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from backend.model_files.quantized_tensor import StoredTensor, dequantized
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight


class Linear(ABC):
    """Linear layer with a weight in any format, an optional bias and an optional gate."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Computes the layer: x [T, in] -> [T, out] in x's dtype. With a gate, the result is [T, out / 2]."""

    @abstractmethod
    def ungated(self, x: Tensor) -> Tensor:
        """Computes the layer without its gate, in a new tensor: x [T, in] -> [T, out]. For LoRA (layers/lora.py)."""

    def after_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Computes the layer of the RMS norm of x + residual. Returns its result and x + residual.

        A residual of None counts as zero. None if this layer does not compute the norm, too.
        """
        return None

    def pass_gate_to(self, following: Linear) -> tuple[Linear, Linear]:
        """Returns this layer and the one that is applied to its result, in the form in which both are computed fastest.

        The following layer may apply this layer's gate while it converts its inputs. The returned layers use the same
        weights as these ones, and must be applied one after the other.
        """
        return self, following

    @property
    def packed_weight(self) -> LinearWeight | None:
        """The weight and its format, for a mixture of experts. None if `LinearWeight` cannot describe this layer."""
        return None

    def tied_embedding(self) -> Embedding | None:
        """The embedding that uses this layer's weight, if it is an output head tied to the embedding.

        So only one copy of the weight stays in memory. None if the embedding needs its own copy.
        """
        return None


class Embedding(ABC):
    """Table with one row for each token id."""

    @abstractmethod
    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the rows of token ids: [T] -> [T, in] in the model's dtype."""


class TableEmbedding(Embedding):
    """Embedding with a weight in the model's dtype, packed or not."""

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        self._ops = ops
        self._weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return self._ops.embedding(ids, self._weight)


class Quantization(ABC):
    """Format in which linear layers store their weights. `ops` computes their matrix multiplications.

    `bits` is the memory of one number of a weight, with its share of the scales, in bits. None: as the model's dtype.
    """

    bits: ClassVar[float | None] = None

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def linear(self, weight: StoredTensor, bias: Tensor | None, gate: str | None = None) -> Linear:
        """Creates a linear layer.

        weight: [out, in], as in the checkpoint, in the model's dtype or quantized. gate: as in `Ops.linear`. The layer
        keeps a reference to `weight` only if it computes with it. So the memory of a converted weight is freed.
        """
        return self._linear(dequantized(weight), bias, gate)

    def embedding(self, weight: StoredTensor) -> Embedding:
        """Creates an embedding from a weight [vocab_size, in]. Not quantized further than in the checkpoint."""
        return TableEmbedding(self.ops, dequantized(weight))

    @abstractmethod
    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        """Creates a linear layer from a weight in the model's dtype. Called by `linear`."""
