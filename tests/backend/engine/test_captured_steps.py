"""Which sizes of steps are captured at the start, while the engine is idle, and between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backend.engine.captured_steps import CAPTURE_AFTER, PAUSE_SECONDS, CapturedSteps, DecodeStep
from backend.engine.graphs import sizes_up_to
from backend.engine.prompt_graphs import SIZES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Captures:
    """Notes the sizes in the order in which they are captured."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> DecodeStep:
        self.sizes.append(size)

        def step(seq_lens: Sequence[int]) -> None:
            pass

        return step


@pytest.mark.parametrize(
    ("sizes", "at_start"),
    [
        (sizes_up_to(256), [256, 128, 64, 32, 16, 8, 4, 2, 1]),
        (sizes_up_to(100), [100, 64, 32, 16, 8, 4, 2, 1]),
        (SIZES, [2048, 1024, 512, 256, 128, 64, 32, 16]),
    ],
)
def test_powers_of_two_and_the_largest_are_captured_at_the_start(sizes: Sequence[int], at_start: list[int]) -> None:
    capture = Captures()
    steps = CapturedSteps("a step", sizes, capture)
    assert capture.sizes == at_start  # the largest first
    assert not steps.capture_next()
    assert not steps.is_due


def test_a_size_that_is_needed_is_padded_for_until_it_is_captured() -> None:
    capture = Captures()
    steps = CapturedSteps("a step", [1, 2, 4, 8, 16, 24, 32, 40, 48], capture)
    assert [steps.size_for(count) for count in (1, 3, 16, 17, 24, 33, 41, 48)] == [1, 4, 16, 32, 32, 48, 48, 48]
    del capture.sizes[:]
    assert steps.capture_next()  # that of 17 and 24, the one needed most often
    assert steps.capture_next()
    assert not steps.capture_next()
    assert capture.sizes == [24, 40]
    assert [steps.size_for(count) for count in (17, 24, 25, 33)] == [24, 24, 32, 40]
    assert not steps.capture_next()


def test_while_requests_run_a_capture_is_due_after_many_steps_and_a_pause() -> None:
    clock = Clock()
    steps = CapturedSteps("a step", [1, 2, 4, 8, 16, 24, 32, 40, 48], Captures(), clock)
    clock.now += PAUSE_SECONDS
    for _ in range(CAPTURE_AFTER - 1):
        steps.size_for(20)
    due = [steps.is_due]
    steps.size_for(20)
    due.append(steps.is_due)
    for _ in range(CAPTURE_AFTER):
        steps.size_for(40)
    assert steps.capture_next()
    due.append(steps.is_due)  # not, although the other size was needed as often
    clock.now += PAUSE_SECONDS
    due.append(steps.is_due)
    assert steps.capture_next()
    due.append(steps.is_due)
    assert due == [False, True, False, True, False]
