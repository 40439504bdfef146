"""Errors, endless steps and inconsistent state: every stream is answered, and the engine ends or reports it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from backend.engine import async_engine
from backend.engine.async_engine import AsyncEngine, OutputStream
from backend.engine.errors import EngineDead
from backend.engine.outputs import FinishReason
from tests.backend.engine.scripted_runner import (
    WAIT_SECONDS,
    ScriptedRunner,
    engine,
    make_request,
    read,
    runner,
)

__all__ = ["engine", "runner"]  # fixtures


async def test_an_error_in_a_step_answers_every_stream_and_ends_the_engine(
    engine: AsyncEngine, runner: ScriptedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.hold()
    streams = [engine.submit(make_request(f"r{i}")) for i in range(4)]
    idle = asyncio.create_task(engine.wait_idle())
    await asyncio.sleep(0)
    was_healthy = engine.healthy
    runner.failure = RuntimeError("out of memory")
    with caplog.at_level(logging.CRITICAL):
        runner.release()
        for stream in streams:
            (last,) = await read(stream)
            assert last.finish_reason is FinishReason.ERROR
            assert last.error == "RuntimeError: out of memory"
        await asyncio.wait_for(idle, WAIT_SECONDS)
    assert was_healthy and not engine.healthy
    assert engine.error == "RuntimeError: out of memory"
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.requests_finished[FinishReason.ERROR] >= 1  # those that had reached the scheduler
    with pytest.raises(EngineDead, match="out of memory"):
        engine.submit(make_request())
    await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)


async def test_an_engine_with_an_endless_step_is_not_healthy(
    engine: AsyncEngine, runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "STALL_SECONDS", 0.05)
    runner.hold()
    stream = engine.submit(make_request())
    async with asyncio.timeout(WAIT_SECONDS):
        while engine.healthy:
            await asyncio.sleep(0.01)
    assert engine.stalled
    runner.release()
    await read(stream)
    async with asyncio.timeout(WAIT_SECONDS):
        while not engine.healthy:
            await asyncio.sleep(0.01)


class LateCondition(threading.Condition):
    """Loses one race condition: while a wait times out, another thread holds the lock."""

    meanwhile: Callable[[], None] | None = None

    def wait(self, timeout: float | None = None) -> bool:
        if self.meanwhile is None:
            return super().wait(timeout)
        meanwhile, self.meanwhile = self.meanwhile, None
        meanwhile()
        return False


async def test_a_request_that_arrives_as_the_idle_wait_times_out_is_served(engine: AsyncEngine) -> None:
    condition = LateCondition()
    await read(engine.submit(make_request()))
    await engine.wait_idle()
    streams: asyncio.Queue[OutputStream] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def submit() -> None:
        loop.call_soon_threadsafe(streams.put_nowait, engine.submit(make_request("late")))

    condition.meanwhile = submit
    before, engine._changed = engine._changed, condition
    with before:
        before.notify()  # from here on, the engine's thread waits on the other condition
    async with asyncio.timeout(WAIT_SECONDS):
        assert len(await read(await streams.get())) == 5


async def test_an_inconsistent_pool_ends_the_engine(engine: AsyncEngine) -> None:
    await read(engine.submit(make_request()))
    await engine.wait_idle()
    engine.engine.scheduler.pool._ref_counts[0] = 1
    stream = engine.submit(make_request("again", max_tokens=1))
    await read(stream)
    async with asyncio.timeout(WAIT_SECONDS):
        while engine.healthy:  # until it has been idle for long enough to be checked
            await asyncio.sleep(0.01)
    assert not engine.stats().integrity_ok
    assert engine.error is not None
    assert "IntegrityError" in engine.error
