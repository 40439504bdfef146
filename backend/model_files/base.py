"""Interface of model readers: configuration, tokenizer, chat templates and weights of a model on disk."""

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

TensorReaders = dict[
    str, Callable[[], Tensor | Mxfp4Tensor]
]  # by name; each call reads the tensor, in MXFP4 if stored so


class ModelFiles(ABC):
    """A model on disk, presented in the terms of transformers' files.

    Methods raise `ConfigError` or `WeightsError` for files that cannot be read, and `UnsupportedModel` for features
    that no model here implements. The messages name the file and the field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Content of config.json."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Content of generation_config.json; empty if there is none."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Its post-processor adds the bos token, if any; it neither pads nor truncates."""

    @abstractmethod
    def tokenizer_config(self) -> dict[str, Any]:
        """Special tokens in tokenizer_config.json by role, such as `bos_token`; empty if there are none."""

    @abstractmethod
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources by name, the main one as "default"; empty if there are none."""

    @abstractmethod
    def tensors(self) -> AbstractContextManager[TensorReaders]:
        """Readers of all tensors under transformers' names. They can be called inside the `with` block only."""

    @abstractmethod
    def weights_bytes(self, dtype: torch.dtype) -> int:
        """Memory of all tensors in this dtype."""
