from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from backend.model_files.mxfp4 import Mxfp4Tensor, dequantized
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight


class Linear(ABC):
    """A weight in whatever form it is held."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in] -> [T, out], in x's dtype; with a gate, [T, out / 2]."""

    @property
    def held(self) -> LinearWeight | None:
        """What it computes with, where that is a product of `Ops`."""
        return None

    def embedding(self, weight: Tensor) -> Tensor:
        """What `Ops.embedding` is to read, where this is a head tied to the embedding `weight`."""
        return weight


class Quantization(ABC):
    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def linear(self, weight: Tensor | Mxfp4Tensor, bias: Tensor | None, gate: str | None = None) -> Linear:
        """weight: [out, in] for the model's dtype, as it stands in the checkpoint. The result does not keep it unless
        it computes with it, so that the memory of what was replaced is free again. gate: as for `Ops.linear`."""
        return self._linear(dequantized(weight), bias, gate)

    @abstractmethod
    def _linear(self, weight: Tensor, bias: Tensor | None, gate: str | None) -> Linear:
        """The same of a weight in the model's dtype."""
