"""Where a model comes from: a directory as transformers saves it, or one GGUF file as llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.model_files.base import ModelFiles

DIRECTORY = "directory"
MODEL_FILES = {
    DIRECTORY: "backend.model_files.directory:ModelDirectory",
    ".gguf": "backend.model_files.gguf_file:GgufFile",
}


def open_model_files(path: Path) -> ModelFiles:
    """By the file's suffix; whatever has none of a member's is taken for a directory."""
    name = path.suffix.lower() if path.suffix.lower() in MODEL_FILES else DIRECTORY
    return cast("ModelFiles", load_member(MODEL_FILES, name)(path))
