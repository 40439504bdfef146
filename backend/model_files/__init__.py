"""Readers of models on disk: directories in transformers' layout, and GGUF files in llama.cpp's format.

The engine and the server read models through this package, which imports only `backend.engine.errors`
and `backend.engine.pooling`. Begin at `base.py` for the interface. It presents every format under the names of
transformers' files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.model_files.base import ModelFiles

DIRECTORY = "directory"
GGUF = ".gguf"
MODEL_FILES = {
    DIRECTORY: "backend.model_files.directory:ModelDirectory",
    GGUF: "backend.model_files.gguf_file:GgufFile",
}


def open_model_files(path: Path) -> ModelFiles:
    """Returns the reader of a model. Any file is read as GGUF, because Ollama's GGUF files have no suffix."""
    suffix = GGUF if path.is_file() else path.suffix.lower()
    name = suffix if suffix in MODEL_FILES else DIRECTORY
    return cast("ModelFiles", load_member(MODEL_FILES, name)(path))
