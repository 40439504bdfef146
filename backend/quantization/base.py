"""Interface of quantizations: `Quantization.linear` creates a `Linear` layer from a checkpoint's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from backend.model_files.mxfp4 import Mxfp4Tensor, dequantized
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight


class Linear(ABC):
    """Linear layer with a weight in any format, an optional bias and an optional gate."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Computes the layer: x [T, in] -> [T, out] in x's dtype. With a gate, the result is [T, out / 2]."""

    @property
    def packed_weight(self) -> LinearWeight | None:
        """The weight and its format, for a mixture of experts. None if `LinearWeight` cannot describe this layer."""
        return None

    def tied_embedding(self, weight: Tensor) -> Tensor:
        """Returns the table for `Ops.embedding` if this layer is an output head tied to the embedding `weight`.

        An implementation can return its own copy of the weight, so that only one copy stays in memory.
        """
        return weight


class Quantization(ABC):
    """Format in which linear layers store their weights. `ops` computes their matrix multiplications.

    `bits` is the memory of one number of a weight, with its share of the scales, in bits. None: as the model's dtype.
    """

    bits: ClassVar[float | None] = None

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def linear(self, weight: Tensor | Mxfp4Tensor, bias: Tensor | None, gate: str | None = None) -> Linear:
        """Creates a linear layer.

        weight: [out, in], as in the checkpoint, in the model's dtype or in MXFP4. gate: as in `Ops.linear`. The layer
        keeps a reference to `weight` only if it computes with it. So the memory of a converted weight is freed.
        """
        return self._linear(dequantized(weight), bias, gate)

    @abstractmethod
    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        """Creates a linear layer from a weight in the model's dtype. Called by `linear`."""
