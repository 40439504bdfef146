from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from backend.model_files.mxfp4 import Mxfp4Tensor

TensorReaders = dict[str, Callable[[], Tensor | Mxfp4Tensor]]  # each read when it is called, as it is kept


class ModelFiles(ABC):
    """A model as it lies on disk, told in the terms of transformers' files, whatever its own are.

    What cannot be read raises `ConfigError` or `WeightsError`, and what no model here implements `UnsupportedModel`;
    the messages name file and field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What config.json says."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """What generation_config.json says; empty if nothing does."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """With the post-processor that decides about a leading bos token, and neither padding nor truncation."""

    @abstractmethod
    def tokenizer_config(self) -> dict[str, Any]:
        """What tokenizer_config.json says of special tokens, by `bos_token` and the like; empty if nothing does."""

    @abstractmethod
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources by name, the usual one as "default"; empty if there is none."""

    @abstractmethod
    def tensors(self) -> AbstractContextManager[TensorReaders]:
        """All of them, by the names that transformers gives them. They can be read while the `with` lasts."""

    @abstractmethod
    def weights_bytes(self, dtype: torch.dtype) -> int:
        """The memory that all tensors take in this dtype."""
