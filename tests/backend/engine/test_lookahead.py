"""Predicted steps are those that the scheduler plans, as long as no request arrives or ends in between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.lookahead import plan_ahead
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.pooling import Pooling
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 200, max_num_batched_tokens: int = 16) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=400,
        max_waiting=20,
    )


def make_request(name: str, num_tokens: int, priority: int = 0, **sampling: object) -> Request:
    params = SamplingParams(**({"max_tokens": 9} | sampling))  # type: ignore[arg-type]
    return Request(name, [*range(len(name), len(name) + num_tokens)], params, priority=priority)


def advance(scheduler: Scheduler, plan: Sequence[ScheduledRequest]) -> None:
    scheduler.advance(plan, [RunnerOutput((7,)) if scheduled.catches_up else RunnerOutput() for scheduled in plan])


def parts(plan: Sequence[ScheduledRequest]) -> list[tuple[str, int, int]]:
    return [(scheduled.request.request_id, scheduled.start, scheduled.num_tokens) for scheduled in plan]


@pytest.mark.parametrize("seed", range(20))
def test_the_scheduler_plans_what_was_predicted(seed: int) -> None:
    rolled = random.Random(seed)
    scheduler = make_scheduler(rolled.choice([80, 200]), rolled.choice([8, 16, 64]))
    num_predicted = 0
    for number in range(12):
        priority = rolled.choice([0, 0, 0, -1])
        length, max_tokens = rolled.randrange(1, 60), rolled.randrange(1, 12)
        scheduler.add(make_request(f"r{number}", length, priority, max_tokens=max_tokens))
        expected = None
        for _ in range(rolled.randrange(1, 12)):
            if not scheduler.has_unfinished:
                break
            plan = scheduler.schedule()
            if expected is not None:
                assert parts(plan) == expected
                num_predicted += 1
            next_plan = plan_ahead(scheduler, plan)
            advance(scheduler, plan)
            expected = parts(next_plan) if next_plan and not scheduler.waiting else None
    assert num_predicted > 20


def test_a_prompt_continues_beside_decodes_and_gives_its_first_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("short", 3))
    advance(scheduler, scheduler.schedule())
    scheduler.add(make_request("a long one", 17))
    predicted = []
    for _ in range(4):
        plan = scheduler.schedule()
        predicted.append(parts(plan_ahead(scheduler, plan)))
        advance(scheduler, plan)
    assert predicted == [
        [("short", 4, 1), ("a long one", 7, 7)],
        [("short", 5, 1), ("a long one", 14, 3)],
        [("short", 6, 1), ("a long one", 17, 1)],  # the token that the prompt's last chunk samples
        [("short", 7, 1), ("a long one", 18, 1)],
    ]


def test_a_request_ends_with_its_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("one token", 5, max_tokens=1))
    scheduler.add(make_request("two tokens", 5, max_tokens=2))
    assert parts(plan_ahead(scheduler, scheduler.schedule())) == [("two tokens", 5, 1)]


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"frequency_penalty": 1.0}, {"prompt_logprobs": 0}], ids=str)
def test_what_the_host_samples_or_reads_is_not_predicted(sampling: dict[str, Any]) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("plain", 3))
    scheduler.add(make_request("other", 9, **sampling))
    plan = scheduler.schedule()
    assert parts(plan) == [("plain", 0, 3), ("other", 0, 5)]
    assert plan_ahead(scheduler, plan) == ()


@pytest.mark.parametrize("pooling", Pooling)
def test_prompts_that_become_vectors_are_not_predicted(pooling: Pooling) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("plain", 3))
    scheduler.add(Request("vector", [*range(9)], SamplingParams(max_tokens=1), pooling=pooling))
    plan = scheduler.schedule()
    assert parts(plan) == [("plain", 0, 3), ("vector", 0, 5)]
    assert plan_ahead(scheduler, plan) == ()


def test_prompts_of_background_work_are_not_predicted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("plain", 3))
    scheduler.add(make_request("background", 9, priority=1))
    advance(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert parts(plan) == [("plain", 3, 1), ("background", 0, 2)]
    assert plan_ahead(scheduler, plan) == ()


def test_only_spare_blocks_are_reserved() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("first", 2 * BLOCK_SIZE, max_tokens=4))
    scheduler.add(make_request("second", BLOCK_SIZE, max_tokens=4))
    plan = scheduler.schedule()
    assert scheduler.pool.num_free == 1
    assert plan_ahead(scheduler, plan) == ()  # both need a block
    assert scheduler.pool.num_free == 1
