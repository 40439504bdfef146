"""The number of drafts for simulated costs and acceptance rates."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.speculation.draft_length import MAX_PATIENCE, MIN_PLAIN_STEPS, PLAIN_EVERY, AdaptiveDraftLength

MOST = 8


def make_requests(count: int) -> list[Request]:
    return [Request(f"r{i}", [1], SamplingParams(max_tokens=9)) for i in range(count)]


class Machine:
    """A plain step takes 10 ms and each draft `extra_ms` more; request i's drafts are accepted at `rates[i]`."""

    def __init__(self, extra_ms: float, rates: list[float]) -> None:
        self.extra_ms, self.rates = extra_ms, rates
        self.requests = make_requests(len(rates))
        self.draft_length = AdaptiveDraftLength()
        self.random = Random(0)
        self.seconds = 0.0
        self.tokens = 0

    def step(self) -> list[int]:
        numbers = self.draft_length.num_drafts(self.requests, MOST)
        seconds = 0.010 + 0.001 * self.extra_ms * sum(numbers)
        self.draft_length.record_step(len(numbers), sum(numbers), seconds)
        for request, rate, number in zip(self.requests, self.rates, numbers, strict=True):
            num_accepted = 0
            while num_accepted < number and self.random.random() < rate:
                num_accepted += 1
            if number:
                self.draft_length.record_drafts(request, number, num_accepted)
            self.tokens += num_accepted + 1
        self.seconds += seconds
        return numbers

    def run(self, steps: int = 500) -> list[list[int]]:
        self.seconds, self.tokens = 0.0, 0
        return [self.step() for _ in range(steps)]

    @property
    def speedup(self) -> float:
        return self.tokens / self.seconds / (len(self.rates) / 0.010)


def test_the_first_steps_are_plain_and_later_one_now_and_then() -> None:
    numbers = [number for (number,) in Machine(0.1, [1.0]).run()]
    assert numbers[: MIN_PLAIN_STEPS + 2] == [0] * MIN_PLAIN_STEPS + [3, MOST]  # it starts with a few drafts
    plain = [i for i, number in enumerate(numbers) if not number][MIN_PLAIN_STEPS - 1 :]
    assert {b - a for a, b in pairwise(plain)} == {PLAIN_EVERY + 1}


@pytest.mark.parametrize(("extra_ms", "rate"), [(0.2, 0.9), (1.0, 0.8), (3.0, 0.7)])
def test_drafting_is_used_where_it_pays_off(extra_ms: float, rate: float) -> None:
    machine = Machine(extra_ms, [rate])
    machine.run()
    machine.run()
    most = max((1 - rate ** (k + 1)) / (1 - rate) / (1 + 0.1 * extra_ms * k) for k in range(MOST + 1))
    assert machine.speedup > 1 + 0.75 * (most - 1)


@pytest.mark.parametrize(("extra_ms", "rate"), [(0.5, 0.0), (9.0, 0.6), (2.0, 0.05), (20.0, 0.95)])
def test_drafting_pauses_where_it_does_not_pay_off_except_for_trials(extra_ms: float, rate: float) -> None:
    machine = Machine(extra_ms, [rate])
    machine.run()
    numbers = [number for (number,) in machine.run(4 * MAX_PATIENCE)]
    assert 0 < sum(number > 0 for number in numbers) < 0.02 * len(numbers)
    assert machine.speedup > 0.95


def test_drafting_resumes_when_it_pays_off_again() -> None:
    machine = Machine(1.0, [0.0])
    machine.run(200)
    machine.rates = [0.9]
    machine.run()
    machine.run()
    assert machine.speedup > 1.5


def test_each_request_has_its_own_rate() -> None:
    machine = Machine(0.5, [0.95, 0.0, 0.95, 0.0])
    machine.run()
    sums = [sum(numbers) for numbers in zip(*machine.run(), strict=True)]
    assert min(sums[0], sums[2]) > 10 * max(sums[1], sums[3])


def test_a_new_request_starts_with_the_overall_rate() -> None:
    machine = Machine(1.0, [0.0])
    machine.run()
    machine.requests = make_requests(1)
    assert machine.run(20) == [[0]] * 20


def test_the_same_drafts_pay_off_in_a_small_batch_but_not_in_a_large_one() -> None:
    few, many = Machine(0.8, [0.6] * 2), Machine(0.8, [0.6] * 16)
    many.draft_length = few.draft_length
    for machine in (few, many):
        machine.run()
    assert sum(map(sum, few.run())) / 2 > 10 * sum(map(sum, many.run())) / 16
    assert few.speedup > 1.2
    assert many.speedup > 0.95


def test_one_slow_step_does_not_stop_drafting() -> None:
    machine = Machine(0.5, [0.9])
    machine.run()
    machine.draft_length.record_step(1, 8, 5.0)
    assert machine.step() != [0]
