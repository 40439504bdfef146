from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from backend.engine import async_engine
from backend.engine.async_engine import AsyncEngine, OutputStream
from backend.engine.block_pool import BlockPool
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import ContextTooLong, EngineDead, QueueFull, RequestRefused
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.request import Request, RequestStatus
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler

WAIT_SECONDS = 30  # only reached if a test fails


class ScriptedRunner:
    """Counts up from each prompt's last token. A test can hold it before a step, or make it fail."""

    uses_lookahead = False
    use_idle_time = staticmethod(lambda: False)

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.num_steps = 0
        self.num_interrupted = 0
        self.observe: Callable[[], None] = lambda: None  # called before a step starts and after it has started
        self._gate = threading.Event()
        self._hold_after = math.inf

    def hold(self, *, after: int = 0) -> None:
        self._hold_after = self.num_steps + after

    def release(self) -> None:
        self._gate.set()

    def run(
        self,
        plan: Sequence[ScheduledRequest],
        is_interrupted: Callable[[], bool],
        next_plan: Sequence[ScheduledRequest] = (),
    ) -> list[RunnerOutput] | None:
        self.observe()
        interrupted = is_interrupted()  # every runner checks before it computes anything
        self.observe()
        assert self.num_steps < self._hold_after or self._gate.wait(WAIT_SECONDS)
        if self.failure:
            raise self.failure
        if interrupted or is_interrupted():
            self.num_interrupted += 1
            return None
        self.num_steps += 1
        return [RunnerOutput((scheduled.request.token_ids[-1] + 1,)) for scheduled in plan]


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
async def engine(runner: ScriptedRunner, checkpoint_dir: Callable[[str], Path]) -> AsyncIterator[AsyncEngine]:
    options: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 2, "max_waiting": 2}
    config = EngineConfig(model_dir=checkpoint_dir("llama"), max_model_len=128, **options).resolve()
    scheduler = Scheduler(
        BlockPool(config.num_blocks, config.block_size),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        max_waiting=config.max_waiting,
    )
    engine = AsyncEngine(Engine(config, scheduler, runner))  # type: ignore[arg-type]
    await engine.start()
    yield engine
    runner.release()
    await engine.stop()


def make_request(name: str = "r", first: int = 0, max_tokens: int = 5, priority: int = 0, **sampling: Any) -> Request:
    return Request(name, [first], SamplingParams(max_tokens=max_tokens, **sampling), priority=priority)


async def read(stream: OutputStream) -> list[StepOutput]:
    async with asyncio.timeout(WAIT_SECONDS):
        return [output async for output in stream]


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


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
