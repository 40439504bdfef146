"""Where a model comes from: a directory as transformers saves it, or one GGUF file as llama.cpp reads it."""

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
    """By the file's suffix. Of what has none of a member's, a file is taken for GGUF, as Ollama's blobs are called by
    their digests, and the rest for a directory."""
    suffix = GGUF if path.is_file() else path.suffix.lower()
    name = suffix if suffix in MODEL_FILES else DIRECTORY
    return cast("ModelFiles", load_member(MODEL_FILES, name)(path))
