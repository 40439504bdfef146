"""The interface of quantizations: `Quantization.linear` makes a `Linear` from a checkpoint's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from backend.model_files.mxfp4 import Mxfp4Tensor, dequantized
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight


class Linear(ABC):
    """A linear layer: a weight in any format, an optional bias and an optional gate."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out], in x's dtype; with a gate, [T, out / 2]."""

    @property
    def packed_weight(self) -> LinearWeight | None:
        """The weight that it multiplies with, for a mixture of experts; None if it uses no product of `Ops`."""
        return None

    def tied_embedding(self, weight: Tensor) -> Tensor:
        """The table for `Ops.embedding`, if this is an output head tied to the embedding `weight`."""
        return weight


class Quantization(ABC):
    """One way to hold the weights of linear layers. `ops` computes their products."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def linear(self, weight: Tensor | Mxfp4Tensor, bias: Tensor | None, gate: str | None = None) -> Linear:
        """A linear layer. weight: [out, in], as in the checkpoint, for the model's dtype. gate: as for `Ops.linear`.

        The result keeps a reference to `weight` only if it computes with it, so that the memory of a weight that was
        converted becomes free.
        """
        return self._linear(dequantized(weight), bias, gate)

    @abstractmethod
    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        """The same for a weight in the model's dtype."""
