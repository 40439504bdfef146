from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.backend.checkpoints import build_model, save


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny checkpoint, by its name in `checkpoints.CHECKPOINTS`; each is built once."""
    directories: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in directories:
            directories[name] = save(build_model(name), tmp_path_factory.mktemp(name))
        return directories[name]

    return get
