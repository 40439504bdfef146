"""An engine whose runner counts up, and which a test can hold and let fail."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.engine.async_engine import AsyncEngine, OutputStream
from backend.engine.block_pool import BlockPool
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.outputs import StepOutput
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler

WAIT_SECONDS = 30  # only reached if a test fails


class ScriptedRunner:
    """Counts up from each prompt's last token. A test can hold it before a step, or make it fail."""

    uses_lookahead = False
    use_idle_time = staticmethod(lambda: False)
    model = SimpleNamespace(watch=lambda fail: None, check=lambda: None, close=lambda: None)  # in one process

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
