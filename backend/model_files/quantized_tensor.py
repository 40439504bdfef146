"""Tensors that stay quantized while a model is loaded, so that a layer can keep the checkpoint's own format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor


class QuantizedTensor(ABC):
    """Base class of quantized tensors. Groups of numbers are along the last dimension."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized tensor."""

    @abstractmethod
    def __getitem__(self, places: int | slice) -> Self:
        """Returns a part of the tensor by an index or slice of its first dimension."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Moves the tensor to a device. `dtype` is that of the dequantized tensor."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Returns the tensor in its dtype."""

    @classmethod
    @abstractmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Concatenates tensors along the first dimension."""


StoredTensor = Tensor | QuantizedTensor


def dequantized(tensor: StoredTensor) -> Tensor:
    """Dequantizes a quantized tensor and returns any other unchanged."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def concatenated(parts: Sequence[StoredTensor]) -> StoredTensor:
    """Concatenates tensors along the first dimension. The result is quantized only if all parts have the same class."""
    kind = type(parts[0])
    quantized = [part for part in parts if isinstance(part, QuantizedTensor) and isinstance(part, kind)]
    if len(quantized) < len(parts):
        return torch.cat([dequantized(part) for part in parts])
    return quantized[0].concatenate(quantized)
