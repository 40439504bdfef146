"""Readers of models on disk: a directory as transformers saves it, or a GGUF file as llama.cpp reads it.

This package imports `backend.engine.errors` only; the engine and the server read models through it.
Begin at `base.py` for the interface, which presents every format as transformers' files.
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
    """Returns the reader of a model. Any file is read as GGUF, since Ollama's blobs have no suffix."""
    suffix = GGUF if path.is_file() else path.suffix.lower()
    name = suffix if suffix in MODEL_FILES else DIRECTORY
    return cast("ModelFiles", load_member(MODEL_FILES, name)(path))
