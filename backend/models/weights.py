"""Reads the tensors of a checkpoint. A tensor that is missing or that the model does not use is an error."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from backend.engine.errors import WeightsError
from backend.layers.division import WHOLE, Division
from backend.model_files import open_model_files
from backend.model_files.base import TensorReaders
from backend.model_files.quantized_tensor import StoredTensor, dequantized

MAX_NAMES_SHOWN = 8
PROGRESS_SECONDS = 1.0  # between two lines of progress

logger = logging.getLogger(__name__)  # INFO: progress


class Checkpoint:
    """Open checkpoint of a model, as a context manager. Methods raise `WeightsError`.

    Each tensor can be taken once. `take` converts it to `dtype` on `device`. If the model is divided among processes,
    each takes its part of a tensor, and shapes are those of parts. With `of_image_encoder`, the tensors are those of
    the image encoder beside the language model.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        division: Division = WHOLE,
        *,
        of_image_encoder: bool = False,
    ) -> None:
        self._model_dir = model_dir
        self._division = division
        self._of_image_encoder = of_image_encoder
        self.dtype = dtype
        self._device = device
        self._files = ExitStack()
        self._sources: TensorReaders = {}
        self._num_tensors = 0
        self._next_report = time.monotonic() + PROGRESS_SECONDS

    def __enter__(self) -> Self:
        files = open_model_files(self._model_dir)
        tensors = files.image_encoder_tensors() if self._of_image_encoder else files.tensors()
        self._sources.update(self._files.enter_context(tensors))
        self._num_tensors = len(self._sources)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Takes a tensor out of the checkpoint and returns it in `dtype`, or else in the checkpoint's `dtype`.

        Raises `WeightsError` if the tensor is missing, was already taken or has another shape.
        """
        return dequantized(self.take_packed(name, *shape, dtype=dtype))

    def take_packed(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> StoredTensor:
        """Takes a tensor like `take`, but a quantized tensor stays quantized."""
        if name not in self._sources:
            raise WeightsError(f"tensor {name} is missing from {self._model_dir}; unused tensors: {self._unused()}")
        tensor = self._division.part(name, self._sources.pop(name)())
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + PROGRESS_SECONDS
            logger.info("loading weights: %d of %d tensors", self._num_tensors - len(self._sources), self._num_tensors)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(self._device, dtype or self.dtype)

    def skip(self, name: str) -> None:
        """Removes a tensor that the model does not need. Does nothing if there is no such tensor."""
        self._sources.pop(name, None)

    def finish(self) -> None:
        """Raises `WeightsError` unless all tensors have been taken or skipped."""
        if self._sources:
            raise WeightsError(f"{self._model_dir} has tensors that the model does not use: {self._unused()}")

    def _unused(self) -> str:
        names = sorted(self._sources)
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        return (", ".join(names[:MAX_NAMES_SHOWN]) or "nothing") + more
