"""When the number of threads is chosen again. Times are given, not measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.engine import thread_tuner
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.thread_tuner import (
    FIRST_PAUSE_SECONDS,
    LAST_PAUSE_SECONDS,
    MIN_PAUSE_SECONDS,
    WINDOW_STEPS,
    ThreadTuner,
    create_tuner,
)
from backend.engine.threads import ThreadChoice
from backend.native import library
from tests.backend.engine.test_invariance import make_requests, run

DECODE = ScheduledRequest(Request("r", [1, 2], SamplingParams(max_tokens=1)), 1, 1)
PROMPT = ScheduledRequest(Request("p", [1, 2], SamplingParams(max_tokens=1)), 0, 2)


class Machine:
    """A tuner with a clock that steps move, and choices that a test gives."""

    def __init__(self, num_threads: int = 2, cores: int = 2) -> None:
        self.now = 0.0
        self.answer = num_threads
        self.asked: list[tuple[int, int]] = []
        self.applied: list[int] = []
        self.paused_at: list[float] = []
        self.tuner = ThreadTuner(num_threads, self._choose, self.applied.append, lambda: cores, lambda: self.now)

    def _choose(self, cores: int, current: int) -> ThreadChoice:
        assert len(self.paused_at) == len(self.asked) + 1, "outputs are delivered before the pause"
        self.asked.append((cores, current))
        return ThreadChoice(self.answer, "measured")

    def steps(self, seconds: float, plan: list[ScheduledRequest] | None = None, windows: int = 1) -> None:
        for _ in range(WINDOW_STEPS * windows):
            self.tuner.begin_step(lambda: self.paused_at.append(self.now))
            self.now += seconds
            self.tuner.end_step(plan or [DECODE])

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_slow_decode_steps_are_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.steps(0.010, windows=3)
    machine.wait(MIN_PAUSE_SECONDS)
    machine.steps(0.0149)
    machine.steps(0.010)
    assert not machine.asked, "not slow enough"
    machine.answer = 1
    machine.steps(0.020)
    with caplog.at_level(logging.INFO, thread_tuner.__name__):
        machine.steps(0.020)
    assert machine.asked == [(2, 2)]
    assert machine.applied == [1]
    (record,) = caplog.records
    assert "1 instead of 2, because decode steps take 2.0 times as long as before: measured" in record.getMessage()


def test_it_is_not_chosen_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.steps(0.010)
    machine.steps(0.020, windows=3)
    assert not machine.asked, "too soon after the first choice"
    machine.wait(MIN_PAUSE_SECONDS)
    with caplog.at_level(logging.INFO, thread_tuner.__name__):
        machine.steps(0.020, windows=2)
        assert len(machine.asked) == 1
        machine.wait(MIN_PAUSE_SECONDS)
        machine.steps(0.020, windows=3)
    assert len(machine.asked) == 1, "after a choice, steps are expected to take what they take then"
    assert not machine.applied
    assert not caplog.records, "only changes are logged"


def test_one_slow_step_is_no_reason() -> None:
    machine = Machine()
    machine.steps(0.010)
    machine.wait(MIN_PAUSE_SECONDS)
    for _ in range(3):
        machine.steps(0.010)
        machine.tuner.begin_step(lambda: None)
        machine.wait(1.0)
        machine.tuner.end_step([DECODE])
    assert not machine.asked


def test_only_similar_steps_are_compared() -> None:
    machine = Machine()
    machine.wait(MIN_PAUSE_SECONDS)
    machine.steps(0.010)
    machine.steps(0.100, [PROMPT, DECODE], windows=2)
    machine.steps(0.050, [DECODE] * 16, windows=2)
    machine.steps(0.010, windows=2)
    assert not machine.asked
    machine.steps(0.080, [DECODE] * 17, windows=2)
    assert machine.asked == [(2, 2)]


def test_unused_cores_are_tried_now_and_then() -> None:
    """A neighbour may have left. The pauses grow while nothing changes."""
    machine = Machine(num_threads=1, cores=4)
    pauses = []
    for _ in range(6):
        before, asked = machine.now, len(machine.asked)
        while len(machine.asked) == asked and machine.now < before + 2 * LAST_PAUSE_SECONDS:
            machine.steps(0.1)
        pauses.append(machine.paused_at[-1] - before)
    window = WINDOW_STEPS * 0.1
    expected = [FIRST_PAUSE_SECONDS * 2**n for n in range(6)]
    for pause, seconds in zip(pauses, expected, strict=True):
        assert min(seconds, LAST_PAUSE_SECONDS) <= pause + window <= min(seconds, LAST_PAUSE_SECONDS) + 3 * window
    machine.answer = 2
    machine.wait(LAST_PAUSE_SECONDS)
    machine.steps(0.1, windows=2)
    assert machine.applied == [2]
    machine.wait(FIRST_PAUSE_SECONDS)
    machine.steps(0.1, windows=2)
    assert machine.asked[-2:] == [(4, 1), (4, 2)], "after a change, the pauses are short again"


def test_steady_steps_on_all_cores_are_never_measured() -> None:
    machine = Machine(num_threads=2, cores=2)
    machine.steps(1.0, windows=100)
    assert not machine.asked


def test_a_number_that_is_configured_stays(checkpoint_dir: Callable[[str], Path]) -> None:
    if library.load() is None:
        pytest.skip("there is no compiler here")
    fixed = EngineConfig(model_dir=checkpoint_dir("llama"), device="cpu", num_threads=1, num_blocks=8).resolve()
    assert create_tuner(fixed, lambda count: None) is None
    assert create_tuner(replace(fixed, adapts_threads=True), lambda count: None) is not None
    assert create_tuner(replace(fixed, adapts_threads=True, ops="reference"), lambda count: None) is None


def test_another_number_of_threads_between_two_steps_changes_no_token(checkpoint_dir: Callable[[str], Path]) -> None:
    """Recorded steps are recorded again."""
    if library.load() is None:
        pytest.skip("there is no compiler here")
    options: dict[str, Any] = {
        "model_dir": checkpoint_dir("llama"),
        "device": "cpu",
        "num_blocks": 64,
        "num_threads": 1,
    }
    expected = run(Engine.load(EngineConfig(**options)), make_requests())
    engine = Engine.load(EngineConfig(**options))
    begun = 0

    class Alternating(ThreadTuner):
        def begin_step(self, before_pause: Callable[[], None]) -> None:
            nonlocal begun
            begun += 1
            self._apply(1 + begun // 3 % 2)

        def end_step(self, plan: object) -> None:
            pass

    engine._tuner = Alternating(1, lambda cores, current: ThreadChoice(1, ""), engine._use_threads)
    assert run(engine, make_requests()) == expected
    assert begun > 6
    engine._use_threads(3)
    assert engine.runner.model.ops.call.num_threads == 3  # type: ignore[attr-defined]
    assert engine.runner.model.programs is not None
    assert not engine.runner.model.programs.recorded
    engine._use_threads(1)
