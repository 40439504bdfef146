"""Interface of model readers: configuration, tokenizer, chat templates and weights of a model on disk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from backend.model_files.quantized_tensor import StoredTensor

TensorReaders = dict[str, Callable[[], StoredTensor]]  # from a tensor's name to a function that reads it


class ModelFiles(ABC):
    """Base class of model readers. Each method returns the content of one of transformers' files.

    A method must raise `ConfigError` or `WeightsError` if a file cannot be read, and `UnsupportedModel` for a feature
    that the engine does not implement. The message must name the file and the field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Returns the content of config.json."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Returns the content of generation_config.json, or an empty dictionary if the model has none."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Its post-processor adds the bos token, if any. It must neither pad nor truncate."""

    @abstractmethod
    def tokenizer_config(self) -> dict[str, Any]:
        """Returns the special tokens of tokenizer_config.json by role, such as `bos_token`. Can be empty."""

    @abstractmethod
    def chat_templates(self) -> dict[str, str]:
        """Returns the chat templates' Jinja sources by name. The main template is "default". Can be empty."""

    def modules(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns sentence-transformers' modules in their order: each one's type and settings. Empty if not listed."""
        return []

    def image_settings(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Returns config.json, as it is stored, and the settings of the image processor. None: text alone is read."""
        return None

    @abstractmethod
    def tensors(self) -> AbstractContextManager[TensorReaders]:
        """Returns a context manager with a reader of each tensor, under transformers' names.

        The readers can be called only inside the `with` block.
        """

    def image_encoder_tensors(self) -> AbstractContextManager[TensorReaders]:
        """As `tensors`, for the image encoder of a model that has `image_settings`. Their names begin with `visual`."""
        raise NotImplementedError

    def image_encoder_bytes(self, dtype: torch.dtype) -> int:
        """Returns the memory that the image encoder's tensors take in this dtype, in bytes."""
        return 0

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """Returns the files that contain the tensors, in a fixed order."""

    @abstractmethod
    def weights_bytes(
        self, dtype: torch.dtype, linear_bits: float | None = None, *, stays_quantized: bool = False
    ) -> int:
        """Returns the memory that all tensors take in this dtype, in bytes.

        If `linear_bits` is given, each number of a linear layer's weight takes so many bits. If `stays_quantized`, the
        weights that the engine can multiply as they are stored take as many bytes as in the files.
        """


def bytes_of_weights(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, linear_bits: float | None) -> int:
    """Returns the memory of tensors with these shapes, as `ModelFiles.weights_bytes` does."""
    plain_bits = 8.0 * dtype.itemsize
    bits = (
        math.prod(shape) * (plain_bits if linear_bits is None or not _is_linear(name, shape) else linear_bits)
        for name, shape in shapes.items()
    )
    return int(sum(bits) / 8)


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    return len(shape) > 1 and not any(word in name for word in ("embed_tokens", "token_embd"))
