"""Calls that run between two steps, on the engine's thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from backend.engine.async_engine import AsyncEngine
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


async def test_a_call_runs_between_two_steps_and_returns_its_result(
    engine: AsyncEngine, runner: ScriptedRunner
) -> None:
    runner.hold(after=2)
    reading = asyncio.create_task(read(engine.submit(make_request())))
    while runner.num_steps < 2:
        await asyncio.sleep(0)
    called = engine.call(
        lambda: (threading.current_thread().name, engine.engine.scheduler.running[0].num_output_tokens)
    )
    cancelled = engine.call(lambda: pytest.fail("it was cancelled"))
    assert cancelled.cancel()
    assert not called.done()
    runner.release()
    name, num_output_tokens = await asyncio.to_thread(called.result, WAIT_SECONDS)
    assert name == "engine"
    assert num_output_tokens >= 2
    await reading
    assert await asyncio.to_thread(engine.call(lambda: engine.engine.has_unfinished).result, WAIT_SECONDS) is False


async def test_calls_that_the_engine_does_not_reach_fail(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold()
    runner.failure = RuntimeError("broken")
    stream = engine.submit(make_request())
    await asyncio.sleep(0.01)
    pending, cancelled = (engine.call(engine.stats) for _ in range(2))
    cancelled.cancel()
    runner.release()
    assert (await read(stream))[-1].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineDead, match="broken"):
        await asyncio.to_thread(pending.result, WAIT_SECONDS)
    with pytest.raises(EngineDead, match="broken"):
        engine.call(engine.stats).result()


async def test_an_exception_of_a_call_ends_the_engine(engine: AsyncEngine) -> None:
    def fail() -> None:
        raise RuntimeError("half done")

    with pytest.raises(EngineDead, match="half done"):
        await asyncio.to_thread(engine.call(fail).result, WAIT_SECONDS)
    assert not engine.healthy
