"""The rules of the scheduler one by one; `test_scheduler_histories.py` tests them all at once."""

from __future__ import annotations

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.errors import ContextTooLong, QueueFull, RequestRefused
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.plan import RunnerOutput
from backend.engine.request import Request, RequestStatus
from backend.engine.sampling_params import SamplingParams
from backend.engine.scheduler import Scheduler


def make_scheduler(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 64,
    max_waiting: int = 8,
    caching: bool = True,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
        enable_prefix_caching=caching,
    )


def make_request(
    name: str, prompt: list[int] | int, max_tokens: int = 8, *, arrived: float = 0.0, priority: int = 0
) -> Request:
    token_ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(name, token_ids, SamplingParams(max_tokens=max_tokens), priority=priority, arrived=arrived)


def step(scheduler: Scheduler, token: int = 99) -> tuple[dict[str, int], list[StepOutput]]:
    """Runs one step. Returns each request's number of tokens, and the outputs."""
    plan = scheduler.schedule()
    assert plan, "there are unfinished requests, but none advances"
    computed = [RunnerOutput((token,)) if scheduled.catches_up else RunnerOutput() for scheduled in plan]
    outputs = scheduler.advance(plan, computed)
    return {scheduled.request.request_id: scheduled.num_tokens for scheduled in plan}, outputs


def run(scheduler: Scheduler) -> None:
    while scheduler.has_unfinished:
        step(scheduler)


def test_a_long_prompt_is_chunked_and_decodes_go_first() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("short", 3, arrived=1))
    scheduler.add(make_request("long", list(range(50, 70)), arrived=2))
    assert step(scheduler)[0] == {"short": 3, "long": 5}
    assert step(scheduler)[0] == {"short": 1, "long": 7}
    assert step(scheduler)[0] == {"short": 1, "long": 7}
    plan, outputs = step(scheduler)
    assert plan == {"short": 1, "long": 1}
    assert [output.request_id for output in outputs] == ["short", "long"]


def test_chunks_that_end_inside_a_block_still_leave_every_full_block_cached() -> None:
    scheduler = make_scheduler(budget=5)
    scheduler.add(make_request("first", 16, max_tokens=1))
    run(scheduler)
    again = make_request("again", 16, max_tokens=1)
    scheduler.add(again)
    run(scheduler)
    assert again.num_cached_tokens == 12  # not the last block: its last token must be computed again
    assert scheduler.counters.prefix_cache_queries == 32
    assert scheduler.counters.prefix_cache_hits == 12


def test_output_is_reused_as_the_prefix_of_the_next_turn() -> None:
    scheduler = make_scheduler()
    first = make_request("first", 6, max_tokens=4)
    scheduler.add(first)
    run(scheduler)
    follow_up = make_request("follow-up", [*first.token_ids, 1, 2, 3])
    scheduler.add(follow_up)
    run(scheduler)
    assert follow_up.num_cached_tokens == 8


def test_blocks_are_not_shared_across_salts() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("first", 12))
    run(scheduler)
    salted = make_request("salted", 12)
    salted.cache_salt = "tenant"
    scheduler.add(salted)
    run(scheduler)
    assert salted.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_cached() -> None:
    scheduler = make_scheduler(caching=False)
    for name in "ab":
        request = make_request(name, 12)
        scheduler.add(request)
        run(scheduler)
        assert request.num_cached_tokens == 0
    assert scheduler.pool.num_cached == 0
    assert scheduler.counters.prefix_cache_queries == 0


def test_the_least_urgent_is_preempted_and_resumes_from_its_own_cached_blocks() -> None:
    scheduler = make_scheduler(num_blocks=5, budget=32)
    first = make_request("first", [1] * 7, max_tokens=9, arrived=1)
    second = make_request("second", [2] * 9, max_tokens=4, arrived=2)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    step(scheduler)
    assert step(scheduler)[0] == {"first": 1}  # its third block was the second's last
    assert (second.status, second.num_preemptions, second.block_table) == (RequestStatus.WAITING, 1, [])
    run(scheduler)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (first.num_output_tokens, second.num_output_tokens) == (9, 4)
    assert scheduler.counters.preemptions == 1
    assert scheduler.counters.prompt_tokens == 16
    assert scheduler.counters.generation_tokens == 13


def test_priority_decides_who_starts_and_who_gives_way() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("batch", 4, max_tokens=1, priority=5, arrived=1))
    scheduler.add(make_request("late", 4, max_tokens=1, arrived=3))
    scheduler.add(make_request("early", 4, max_tokens=1, arrived=2))
    assert [list(step(scheduler)[0]) for _ in range(3)] == [["early"], ["late"], ["batch"]]


def test_no_request_overtakes_one_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("running", 9, max_tokens=4, arrived=1))
    step(scheduler)
    scheduler.add(make_request("big", [7] * 8, arrived=2))
    scheduler.add(make_request("small", [8] * 2, arrived=3))
    assert [list(step(scheduler)[0]) for _ in range(3)] == [["running"], ["running"], ["running"]]
    assert list(step(scheduler)[0]) == ["big", "small"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "param"),
    [
        (0, 1, RequestRefused, "prompt"),
        (32, 1, ContextTooLong, "prompt"),
        (31, 2, ContextTooLong, "max_tokens"),
        (20, 6, RequestRefused, "max_tokens"),  # 25 tokens in the cache at most, in 6 blocks of 4
    ],
)
def test_a_request_that_can_never_fit_is_rejected(
    prompt: int, max_tokens: int, error: type[RequestRefused], param: str
) -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=32)
    with pytest.raises(error) as caught:
        scheduler.add(make_request("r", prompt, max_tokens))
    assert caught.value.param == param
    assert not scheduler.has_unfinished


def test_a_request_that_just_fits_is_served() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=32)
    request = make_request("r", 20, 5)
    scheduler.add(request)
    run(scheduler)
    assert request.num_output_tokens == 5


def test_the_queue_is_bounded_and_ids_are_unique() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_waiting=1)
    scheduler.add(make_request("a", 4))
    with pytest.raises(RequestRefused, match="is already running"):
        scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 4))
    with pytest.raises(QueueFull):
        scheduler.add(make_request("c", 4))
    scheduler.abort("a")
    scheduler.add(make_request("c", 4))


def test_the_last_output_has_finish_reason_and_timing() -> None:
    scheduler = make_scheduler()
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=9, stop_token_ids=frozenset({7}), min_tokens=2))
    scheduler.add(request)
    step(scheduler, token=7)  # too early to stop
    _, (output,) = step(scheduler, token=7)
    assert (output.new_token_ids, output.finish_reason) == ((7,), FinishReason.STOP)
    assert output.timing is not None
    assert 0 < output.timing.arrived <= output.timing.scheduled <= output.timing.first_token <= output.timing.finished
    assert scheduler.counters.finished[FinishReason.STOP] == 1


def test_an_urgent_request_is_scheduled_before_a_running_background_prompt() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("batch", list(range(100, 140)), arrived=1, priority=10))
    assert step(scheduler)[0] == {"batch": 8}
    scheduler.add(make_request("urgent", 6, arrived=2))
    assert step(scheduler)[0] == {"urgent": 6}
    assert step(scheduler)[0] == {"urgent": 1, "batch": 2}


def test_beside_an_urgent_prompt_background_work_decodes_but_computes_no_prompt() -> None:
    scheduler = make_scheduler(budget=8, num_blocks=32)
    scheduler.add(make_request("decoding", [1] * 4, arrived=1, priority=10))
    step(scheduler)
    scheduler.add(make_request("in prefill", [2] * 14, arrived=2, priority=10))
    assert step(scheduler)[0] == {"decoding": 1, "in prefill": 7}
    scheduler.add(make_request("new", [3] * 3, arrived=3, priority=10))
    scheduler.add(make_request("urgent", [4] * 9, arrived=4))
    assert step(scheduler)[0] == {"urgent": 8}
    # The last token of its prompt counts as a single token, like a decode.
    assert step(scheduler)[0] == {"urgent": 1, "decoding": 1, "in prefill": 2}
    assert step(scheduler)[0] == {"urgent": 1, "decoding": 1, "in prefill": 2}
    scheduler.add(make_request("urgent too", [5] * 3, arrived=5))
    assert step(scheduler)[0] == {"urgent": 1, "urgent too": 3, "decoding": 1}
    for name in ("urgent", "urgent too"):
        scheduler.abort(name)
    assert step(scheduler)[0] == {"decoding": 1, "in prefill": 3, "new": 3}
    run(scheduler)


def test_an_urgent_request_preempts_background_work_for_a_sequence_slot() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name, arrived in (("old", 1), ("new", 2)):
        scheduler.add(make_request(name, 4, arrived=arrived, priority=10))
    step(scheduler)
    scheduler.add(make_request("urgent", 4, arrived=3))
    plan, _ = step(scheduler)
    assert [*plan] == ["urgent", "old"]
    assert [request.request_id for request in scheduler.waiting] == ["new"]
    # Requests of the same priority wait for a free slot.
    scheduler.add(make_request("equal", 4, arrived=4))
    scheduler.add(make_request("equal too", 4, arrived=5))
    assert [*step(scheduler)[0]] == ["urgent", "equal"]
    assert [request.request_id for request in scheduler.waiting] == ["equal too", "old", "new"]
    run(scheduler)


def test_an_urgent_request_preempts_the_last_background_request_for_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=64, caching=False)
    for name, arrived in (("old", 1), ("new", 2)):
        scheduler.add(make_request(name, 15, arrived=arrived, priority=10))
    step(scheduler)
    scheduler.add(make_request("urgent", 13, arrived=3))
    assert step(scheduler)[0] == {"urgent": 13, "old": 1}
    assert scheduler.counters.preemptions == 1
    run(scheduler)
    assert scheduler.counters.finished[FinishReason.LENGTH] == 3


def test_a_deadline_ends_a_running_or_waiting_request() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, deadline in (("running", 20.0), ("waiting", 10.0), ("patient", 30.0)):
        request = make_request(name, 4, max_tokens=60)
        request.deadline = deadline
        scheduler.add(request)
    step(scheduler)
    assert scheduler.expire(9.9) == []
    assert [(o.request_id, o.finish_reason) for o in scheduler.expire(10.0)] == [("waiting", FinishReason.DEADLINE)]
    assert scheduler.abort("patient")
    assert [output.request_id for output in scheduler.expire(100.0)] == ["running"]
    assert not scheduler.has_unfinished
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_request_with_an_error_ends_with_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    (output,) = scheduler.advance(scheduler.schedule(), [RunnerOutput((1,), error="no token fits")])
    assert (output.finish_reason, output.error, output.new_token_ids) == (FinishReason.ERROR, "no token fits", ())


def test_with_max_tokens_0_a_request_ends_after_its_prompt() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_request("a", 6, max_tokens=0))
    assert step(scheduler) == ({"a": 4}, [])
    _, (output,) = step(scheduler)
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.LENGTH, ())
    assert scheduler.counters.generation_tokens == 0
    assert scheduler.counters.prompt_tokens == 6
