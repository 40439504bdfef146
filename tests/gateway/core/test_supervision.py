"""Background tasks that fail are restarted after growing pauses, counted, and named while they stay down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core import supervision
from gateway.core.supervision import FAILURES_UNTIL_DOWN, Supervisor

PATIENCE_SECONDS = 10.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(supervision, "MAX_PAUSE_SECONDS", 0.004)


class Work:
    """Work that fails as often as a test says, and then waits."""

    def __init__(self, failures: int, error: Callable[[], Exception] = lambda: ValueError("a secret")) -> None:
        self.runs = 0
        self.running = asyncio.Event()  # set when a run does not fail
        self.may_end = asyncio.Event()
        self._failures = failures
        self._error = error

    async def __call__(self) -> None:
        self.runs += 1
        if self.runs <= self._failures:
            raise self._error()
        self.running.set()
        await self.may_end.wait()


async def in_time(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, PATIENCE_SECONDS)


async def test_work_that_fails_is_restarted_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, work = Supervisor(), Work(failures=2)
    task = supervisor.start("a task", work)
    await in_time(work.running.wait())
    assert supervisor.failures == {"a task": 2} and not task.is_down and not task.is_done()
    assert [record.message for record in caplog.records] == [
        "background task 'a task' failed (1 in a row); it is restarted in 0.001 s",
        "background task 'a task' failed (2 in a row); it is restarted in 0.002 s",
    ]
    work.may_end.set()
    await in_time(task.join())
    assert task.is_done() and work.runs == 3


@pytest.mark.parametrize("essential", [True, False])
async def test_a_task_that_keeps_failing_is_down(essential: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "warmpath")
    supervisor, work = Supervisor(), Work(failures=FAILURES_UNTIL_DOWN)
    task = supervisor.start("a task", work, essential=essential)
    await in_time(work.running.wait())
    assert task.is_down and supervisor.down() == {"a task": "ValueError"}
    assert supervisor.essential_down() == (["a task"] if essential else [])
    await in_time(task.cancel())
    assert supervisor.down() == {} and supervisor.essential_down() == []


async def test_a_run_that_lasts_ends_the_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, work = Supervisor(), Work(failures=5)
    task = supervisor.start("a task", work)
    await in_time(work.running.wait())
    assert (task.is_down, supervisor.down()) == (True, {"a task": "ValueError"})
    monkeypatch.setattr(supervision, "STABLE_SECONDS", 0.0)
    assert (task.is_down, supervisor.down()) == (False, {})
    await in_time(task.cancel())


async def test_pauses_grow_up_to_their_bound(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, work = Supervisor(), Work(failures=5)
    task = supervisor.start("a task", work)
    await in_time(work.running.wait())
    pauses = [record.message.split()[-2] for record in caplog.records]
    assert pauses == ["0.001", "0.002", "0.004", "0.004", "0.004"]
    await in_time(task.cancel())


async def test_a_failure_after_a_long_run_begins_with_the_first_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "STABLE_SECONDS", 0.0)
    supervisor, work = Supervisor(), Work(failures=3)
    task = supervisor.start("a task", work)
    await in_time(work.running.wait())
    assert all("(1 in a row)" in record.message for record in caplog.records)
    await in_time(task.cancel())


async def test_work_that_returns_is_done() -> None:
    supervisor, work = Supervisor(), Work(failures=0)
    work.may_end.set()
    task = supervisor.start("a task", work)
    await in_time(work.running.wait())
    await asyncio.sleep(0)
    assert task.is_done() and work.runs == 1 and not supervisor.failures


async def test_join_in_a_pause_does_not_wait_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 1e6)
    monkeypatch.setattr(supervision, "MAX_PAUSE_SECONDS", 1e6)
    supervisor, work = Supervisor(), Work(failures=9)
    task = supervisor.start("a task", work)
    await asyncio.sleep(0)
    await in_time(task.join())
    assert work.runs == 1


async def test_a_group_of_failures_is_a_failure() -> None:
    supervisor, work = Supervisor(), Work(failures=1, error=lambda: ExceptionGroup("both", [ValueError(), OSError()]))
    task = supervisor.start("a task", work)
    await in_time(work.running.wait())
    assert supervisor.failures == {"a task": 1}
    await in_time(task.cancel())


async def test_cancelled_work_is_not_restarted() -> None:
    supervisor, work = Supervisor(), Work(failures=0)
    task = supervisor.start("a task", work)
    await in_time(work.running.wait())
    await in_time(task.cancel())
    assert task.is_done() and work.runs == 1 and not supervisor.failures
