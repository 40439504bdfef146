"""A checkpoint's tensors, each to be taken exactly once: what is missing and what is left over are both errors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from backend.engine.errors import WeightsError
from backend.model_files import open_model_files
from backend.model_files.base import TensorReaders
from backend.model_files.mxfp4 import Mxfp4Tensor, dequantized

MAX_NAMES_SHOWN = 8


class Checkpoint:
    """Opens the files of a model for as long as the `with` lasts. Tensors are converted to `dtype` on `device` when
    they are taken. Raises `WeightsError`."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._model_dir = model_dir
        self.dtype = dtype
        self._device = device
        self._files = ExitStack()
        self._sources: TensorReaders = {}

    def __enter__(self) -> Self:
        self._sources.update(self._files.enter_context(open_model_files(self._model_dir).tensors()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the checkpoint's target dtype, or another. Raises `WeightsError` if there is no such tensor, or not of
        this shape."""
        return dequantized(self.take_packed(name, *shape, dtype=dtype))

    def take_packed(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor | Mxfp4Tensor:
        """The same, but for what the files keep in four bits, which stays so."""
        if name not in self._sources:
            raise WeightsError(f"tensor {name} is missing from {self._model_dir}; not taken so far: {self._left()}")
        tensor = self._sources.pop(name)()
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"tensor {name} has shape {tuple(tensor.shape)}, and {shape} is expected")
        return tensor.to(self._device, dtype or self.dtype)

    def skip(self, name: str) -> None:
        """Leaves a tensor out on purpose. Skipping what is not there is safe and does nothing."""
        self._sources.pop(name, None)

    def finish(self) -> None:
        """Raises `WeightsError` unless everything has been taken or skipped."""
        if self._sources:
            raise WeightsError(f"{self._model_dir} has tensors that the model does not know: {self._left()}")

    def _left(self) -> str:
        names = sorted(self._sources)
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        return (", ".join(names[:MAX_NAMES_SHOWN]) or "nothing") + more
