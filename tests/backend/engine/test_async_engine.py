from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from backend.engine.async_engine import AsyncEngine
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import ContextTooLong, EngineDead, QueueFull, RequestRefused
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.request import RequestStatus
from tests.backend.engine.scripted_runner import (
    WAIT_SECONDS,
    ScriptedRunner,
    engine,
    make_request,
    read,
    runner,
    tokens,
)

__all__ = ["engine", "runner"]  # fixtures


async def test_each_request_has_its_own_stream_that_ends_with_a_finish_reason(engine: AsyncEngine) -> None:
    streams = [engine.submit(make_request(f"r{i}", first=10 * i)) for i in range(4)]
    for i, outputs in enumerate(await asyncio.gather(*map(read, streams))):
        assert tokens(outputs) == [10 * i + n for n in range(1, 6)]
        assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert await read(streams[0]) == []  # a stream that has ended stays ended
    await engine.wait_idle()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage, stats.integrity_ok) == (0, 0, 0.0, True)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (4, 20)
    assert stats.requests_finished[FinishReason.LENGTH] == 4


async def test_outputs_are_streamed_while_the_request_runs(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold()
    stream = engine.submit(make_request())
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not first.done()
    runner.release()
    assert (await asyncio.wait_for(first, WAIT_SECONDS)).new_token_ids == (1,)
    assert tokens(await read(stream)) == [2, 3, 4, 5]


async def test_outputs_are_delivered_when_the_next_step_starts(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    """Not while it is prepared, which also needs the GIL. The last outputs are delivered at once."""
    loop, outputs, seen = asyncio.get_running_loop(), list[StepOutput](), list[int]()

    async def observe() -> None:
        for _ in range(10):  # until all delivered outputs have been read
            await asyncio.sleep(0)
        seen.append(len(outputs))

    runner.observe = lambda: asyncio.run_coroutine_threadsafe(observe(), loop).result(WAIT_SECONDS)
    async for output in engine.submit(make_request(max_tokens=4)):
        outputs.append(output)
    assert seen == [0, 0, 0, 1, 1, 2, 2, 3]
    assert tokens(outputs) == [1, 2, 3, 4]


async def test_closing_a_stream_aborts_before_the_next_step_and_frees_every_block(
    engine: AsyncEngine, runner: ScriptedRunner
) -> None:
    runner.hold(after=3)
    stream = engine.submit(make_request(max_tokens=100))
    await anext(stream)
    await stream.aclose()
    runner.release()
    await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)
    assert runner.num_steps <= 4  # at most the one that was running
    stats = engine.stats()
    assert (stats.num_free_blocks, stats.aborted_total) == (32, 1)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_leaving_a_loop_inside_aclosing_aborts(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold(after=3)
    async with aclosing(engine.submit(make_request(max_tokens=100))) as stream:
        async for _ in stream:
            break
    runner.release()
    await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)
    assert engine.stats().aborted_total == 1
    assert engine.stats().num_free_blocks == 32


async def test_cancelling_the_reader_aborts(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold()
    reader = asyncio.create_task(read(engine.submit(make_request(max_tokens=100))))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    runner.release()
    await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)
    assert engine.stats().aborted_total == 1


async def test_abort_by_id_ends_the_stream_with_that_reason(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold(after=2)
    stream = engine.submit(make_request(max_tokens=100))
    other = engine.submit(make_request("other"))
    await anext(stream)
    engine.abort("r")
    engine.abort("unknown")
    runner.release()
    assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
    assert tokens(await read(other)) == [1, 2, 3, 4, 5]


async def test_the_stream_of_a_waiting_request_can_be_closed(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold()
    streams = [engine.submit(make_request(f"r{i}", max_tokens=3)) for i in range(4)]
    await streams[3].aclose()
    runner.release()
    for stream in streams[:3]:
        assert tokens(await read(stream)) == [1, 2, 3]
    await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)
    assert engine.stats().aborted_total == 1


async def test_rejections_are_raised_at_once_and_leave_no_state(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold()
    with pytest.raises(ContextTooLong) as too_long:
        engine.submit(make_request(max_tokens=200))
    assert too_long.value.param == "max_tokens"
    with pytest.raises(RequestRefused) as unknown_token:
        engine.submit(make_request(first=100_000))
    assert unknown_token.value.param == "prompt"
    with pytest.raises(RequestRefused) as unknown_bias:
        engine.submit(make_request(logit_bias={-1: 1.0}))
    assert unknown_bias.value.param == "logit_bias"
    streams = [engine.submit(make_request(f"r{i}")) for i in range(4)]
    with pytest.raises(RequestRefused, match="is already running"):
        engine.submit(make_request("r0"))
    with pytest.raises(QueueFull):
        engine.submit(make_request("one too many"))
    runner.release()
    for stream in streams:
        assert len(await read(stream)) == 5
    assert len(await read(engine.submit(make_request("one too many")))) == 5


async def test_a_full_queue_displaces_its_least_urgent_request_for_a_more_urgent_one(
    engine: AsyncEngine, runner: ScriptedRunner
) -> None:
    runner.hold(after=1)
    with engine._changed:  # so that the first step has both requests
        running = [engine.submit(make_request(f"r{i}", priority=10)) for i in range(2)]
    for stream in running:
        await anext(stream)
    waiting = [engine.submit(make_request(f"w{i}", priority=priority)) for i, priority in enumerate((10, 20))]
    urgent = [engine.submit(make_request("urgent 0", priority=0))]
    # The least urgent one was displaced, and its stream ended without waiting for a step.
    assert [output.finish_reason for output in await read(waiting[1])] == [FinishReason.DISPLACED]
    with pytest.raises(QueueFull):  # no waiting request is less urgent than this one
        engine.submit(make_request("another", priority=10))
    urgent.append(engine.submit(make_request("urgent 1", priority=0)))
    assert [output.finish_reason for output in await read(waiting[0])] == [FinishReason.DISPLACED]
    with pytest.raises(QueueFull):  # a request that has output is not displaced, but may be preempted
        engine.submit(make_request("urgent 2", priority=0))
    runner.release()
    assert [tokens(await read(stream)) for stream in urgent] == [[1, 2, 3, 4, 5]] * 2
    assert [tokens(await read(stream)) for stream in running] == [[2, 3, 4, 5]] * 2
    await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)
    stats = engine.stats()
    assert stats.requests_finished[FinishReason.DISPLACED] == 2
    assert (stats.num_free_blocks, stats.aborted_total) == (32, 0)


async def test_a_background_step_is_interrupted_for_an_urgent_request(
    engine: AsyncEngine, runner: ScriptedRunner
) -> None:
    runner.hold()
    background = engine.submit(make_request("background", priority=10))
    async with asyncio.timeout(WAIT_SECONDS):
        while background.request.status is not RequestStatus.RUNNING:
            await asyncio.sleep(0.001)
    urgent = engine.submit(make_request("urgent", first=10))
    equal = engine.submit(make_request("equal", priority=10))
    runner.release()
    assert tokens(await read(urgent)) == [11, 12, 13, 14, 15]
    assert tokens(await read(background)) == tokens(await read(equal)) == [1, 2, 3, 4, 5]
    assert runner.num_interrupted == 1
    assert engine.stats().steps_given_up_total == 1


async def test_tokens_after_a_stop_string_are_counted_as_unwanted(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold(after=3)
    request = make_request(max_tokens=50)
    stream = engine.submit(request)
    await anext(stream)
    engine.stop_early(request, num_wanted=1)
    runner.release()
    assert (await read(stream))[-1].finish_reason is FinishReason.STOP
    await engine.wait_idle()
    stats = engine.stats()
    assert stats.generation_tokens_total - stats.unwanted_tokens_total == 1
    assert (stats.requests_finished[FinishReason.STOP], stats.aborted_total) == (1, 0)

    ended = make_request("ended")
    await read(engine.submit(ended))
    engine.stop_early(ended, num_wanted=2)  # its last step had both the stop string and the end
    await read(engine.submit(make_request("last", max_tokens=1)))
    stats = engine.stats()
    assert stats.generation_tokens_total - stats.unwanted_tokens_total == 1 + 2 + 1


async def test_stopping_aborts_running_and_waiting_requests(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    runner.hold(after=2)
    streams = [engine.submit(make_request(f"r{i}", max_tokens=100)) for i in range(4)]
    await anext(streams[0])
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)  # the stop is requested, and waits for the running step
    runner.release()
    await stopping
    for stream in streams:
        assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
    assert engine.stats().num_free_blocks == 32
    assert not engine.healthy
    assert engine.error is None
    with pytest.raises(EngineDead, match="not running"):
        engine.submit(make_request())
    await engine.stop()


async def test_before_start_submit_raises(engine: AsyncEngine) -> None:
    unstarted = AsyncEngine(engine.engine)
    assert not unstarted.healthy
    with pytest.raises(EngineDead):
        unstarted.submit(make_request())
    await unstarted.stop()


async def test_the_engine_sleeps_when_idle_and_wakes_for_each_request(
    engine: AsyncEngine, runner: ScriptedRunner
) -> None:
    for i in range(3):
        await read(engine.submit(make_request(f"r{i}", max_tokens=2)))
        await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)
    assert runner.num_steps == 6


async def test_with_a_real_model(checkpoint_dir: Callable[[str], Path]) -> None:
    config = EngineConfig(model_dir=checkpoint_dir("qwen3"), num_blocks=32, num_threads=1)
    engine = AsyncEngine(Engine.load(config))
    await engine.start()
    try:
        streams = [engine.submit(make_request(f"r{i}", first=i + 3, max_tokens=8, temperature=0.0)) for i in range(4)]
        closed = engine.submit(make_request("closed", max_tokens=100))
        await anext(closed)
        await closed.aclose()
        assert [len(tokens(outputs)) for outputs in await asyncio.gather(*map(read, streams))] == [8] * 4
        await asyncio.wait_for(engine.wait_idle(), WAIT_SECONDS)
        assert engine.stats().num_free_blocks == 32
    finally:
        await engine.stop()
