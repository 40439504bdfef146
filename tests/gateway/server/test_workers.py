"""What the supervisor does about workers that end; `tests/e2e/test_workers.py` has it at work."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.server import workers
from gateway.server.worker_group import WorkerIdentity
from gateway.server.workers import RESTART_MAX_SECONDS, WELL_SECONDS, Supervisor, WorkerProcess
from gateway.settings import Settings

SIGKILLED = -9


@pytest.fixture
def supervisor() -> Any:
    here, there = socket.socketpair()
    with here, there:
        made = Supervisor(Settings(storage="sqlite:///x"), [WorkerIdentity(0, 2), WorkerIdentity(1, 2)], here)
        made._stop_before = time.monotonic()  # nothing is to be started here
        assert made.run(lambda: None) is False  # which also lets go of its pipe
        made._stop_before = None
        yield made


def died(supervisor: Supervisor, worker: WorkerProcess, *, after_seconds: float, code: int = SIGKILLED) -> float:
    """The pause before its restart."""
    worker.process, worker.ready = cast(Any, SimpleNamespace(close=lambda: None)), True
    worker.started_at = time.monotonic() - after_seconds
    supervisor._ended(worker, code, True)
    assert worker.process is None and not worker.ready
    return round(worker.restart_at - time.monotonic(), 1)


def test_a_worker_that_dies_again_and_again_waits_longer_each_time(supervisor: Supervisor) -> None:
    (worker, other) = supervisor._workers
    pauses = [died(supervisor, worker, after_seconds=1.0) for _ in range(9)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, RESTART_MAX_SECONDS, RESTART_MAX_SECONDS]
    assert died(supervisor, worker, after_seconds=WELL_SECONDS + 1) == 0.0  # it had been well
    assert died(supervisor, other, after_seconds=1.0, code=0) == 0.0  # it got no signal


def test_one_that_ends_before_all_were_ready_ends_the_start(supervisor: Supervisor) -> None:
    worker = supervisor._workers[0]
    worker.process = cast(Any, SimpleNamespace(close=lambda: None))
    supervisor._ended(worker, 1, False)
    assert supervisor._stop_before is not None and supervisor._failed


def test_memory_can_not_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="WARMPATH_STORAGE must be sqlite"):
        workers.serve(Settings(workers=2, data_dir=tmp_path), on_ready=lambda url: None)
