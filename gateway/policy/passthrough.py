"""Policy type of paths whose requests pass unchanged to a deployment."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

_PATH = re.compile(r"(/[A-Za-z0-9_~:-][A-Za-z0-9._~:-]*)+")
OWN_PATHS = (
    "/admin", "/health", "/metrics", "/ready", "/v1/batches", "/v1/chat", "/v1/completions", "/v1/embeddings",
    "/v1/files", "/v1/messages", "/v1/models", "/v1/responses",
)  # fmt: skip


def _check_path(path: str) -> str:
    if _PATH.fullmatch(path) is None:
        raise ValueError("must be a path without a query, as in /v1/ocr")
    own = next((each for each in OWN_PATHS if path == each or path.startswith(f"{each}/")), None)
    if own is not None:
        raise ValueError(f"the gateway itself serves {own}")
    return path


PassedPath = Annotated[str, Field(min_length=2, max_length=200), AfterValidator(_check_path)]
PassedPaths = tuple[PassedPath, ...]
