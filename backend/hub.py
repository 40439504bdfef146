"""Downloads models from the Hugging Face Hub.

A module of its own, because importing the hub's client takes a quarter of a second, and most starts download nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError


class DownloadError(Exception):
    """The model cannot be downloaded, and it is not in the local cache."""


def download(model: str, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
    """Returns the directory of a model, downloaded unless it is in the local cache. Raises DownloadError."""
    try:
        return Path(snapshot_download(model, allow_patterns=[*patterns], ignore_patterns=[*ignored]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DownloadError(str(error)) from error
