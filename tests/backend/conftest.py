from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.backend.checkpoints import build_model, save
from tests.backend.levels import LEVELS, LEVELS_OF_THIS_CPU

HIGHEST = LEVELS_OF_THIS_CPU[-1:]
OTHER_LEVELS = {name for level in LEVELS if level not in HIGHEST for name in (level, f"native {level}")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests at other levels than this CPU's highest as slow, so that `make test` compiles only the highest."""
    for item in items:
        parameters = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        if any(isinstance(value, str) and value in OTHER_LEVELS for value in parameters):
            item.add_marker(pytest.mark.slow(seconds=0))


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
