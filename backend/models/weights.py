"""A checkpoint's tensors, each to be taken exactly once: what is missing and what is left over are both errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.engine.errors import WeightsError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_NAMES_SHOWN = 8


class Checkpoint:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists, for as long as the `with`
    lasts. Tensors are converted to `dtype` on `device` when they are taken. Raises `WeightsError`."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._device = device
        self._files = ExitStack()
        self._sources: dict[str, safe_open] = {}

    def __enter__(self) -> Self:
        try:
            for path in self._paths():
                file = self._files.enter_context(safe_open(path, framework="pt"))
                self._sources.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            self._files.close()
            raise WeightsError(f"the weights in {self._model_dir} cannot be read: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the checkpoint's target dtype, or another. Raises `WeightsError` if there is no such tensor, or not of
        this shape."""
        if name not in self._sources:
            raise WeightsError(f"tensor {name} is missing from {self._model_dir}; not taken so far: {self._left()}")
        tensor: Tensor = self._sources.pop(name).get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"tensor {name} has shape {tuple(tensor.shape)}, and {shape} is expected")
        return tensor.to(self._device, dtype or self._dtype)

    def skip(self, name: str) -> None:
        """Leaves a tensor out on purpose. Skipping what is not there is safe and does nothing."""
        self._sources.pop(name, None)

    def finish(self) -> None:
        """Raises `WeightsError` unless everything has been taken or skipped."""
        if self._sources:
            raise WeightsError(f"{self._model_dir} has tensors that the model does not know: {self._left()}")

    def _paths(self) -> list[Path]:
        index = self._model_dir / INDEX
        if not index.exists():
            return [self._model_dir / SINGLE]
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError) as error:
            raise WeightsError(f"{index} is not an index of shards: {error!r}") from error
        return [self._model_dir / name for name in sorted(set(weight_map.values()))]

    def _left(self) -> str:
        names = sorted(self._sources)
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        return (", ".join(names[:MAX_NAMES_SHOWN]) or "nothing") + more
