from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.parallel import processes
from tests.launcher import start_with_file

LoadEngine = Callable[..., Engine]


@pytest.fixture
def load() -> Iterator[LoadEngine]:
    """Loads engines in float32, whose processes end with the test."""
    engines: list[Engine] = []

    def load(directory: Path, **options: Any) -> Engine:
        limits: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "num_blocks": 64}
        engines.append(Engine.load(EngineConfig(model_dir=directory, **limits | options)))
        return engines[-1]

    yield load
    for engine in engines:
        engine.runner.model.close()


@pytest.fixture
def forked_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers are forked from an interpreter that has imported torch, which is most of the CPU time of their start.

    For tests of what they compute. How they start and end is tested with the real start.
    """
    monkeypatch.setattr(processes, "start_process", lambda file: start_with_file(processes.FOLLOWER, file))
