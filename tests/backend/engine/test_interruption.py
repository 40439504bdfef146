from __future__ import annotations

from backend.engine.interruption import MAX_CREDIT_SECONDS, Interruption
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(*priorities: int) -> list[ScheduledRequest]:
    return [
        ScheduledRequest(Request(f"r{priority}", [1], SamplingParams(max_tokens=1), priority=priority), 0, 1)
        for priority in priorities
    ]


def test_a_step_is_interrupted_only_for_a_request_more_urgent_than_all_in_it() -> None:
    interruption = Interruption(Clock())
    is_due = interruption.start_step(plan(10, 20))
    assert not is_due()
    interruption.arriving = 10
    assert not is_due()
    interruption.arriving = 0
    assert is_due()
    assert not interruption.start_step(plan(0, 20))()
    assert interruption.num_interrupted == 1


def test_only_a_share_of_the_time_is_wasted_on_interrupted_steps() -> None:
    clock = Clock()
    interruption = Interruption(clock)
    interruption.arriving = 0
    wasted = 0.0
    for _ in range(1000):
        is_due = interruption.start_step(plan(10))
        clock.now += 0.5
        if is_due():
            wasted += 0.5
        else:
            clock.now += 0.5
    assert 0.09 * clock.now < wasted < 0.1 * clock.now + MAX_CREDIT_SECONDS + 0.5
