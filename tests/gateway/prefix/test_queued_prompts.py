"""What a deployment has still to compute, as its estimates predict it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.prefix.estimate import Estimate
from gateway.prefix.fingerprint import BLOCK_TOKENS


def make_estimate() -> Estimate:
    return Estimate(1000 * BLOCK_TOKENS, prefill_tokens_per_second=1000)


def was_computed(estimate: Estimate, chain: Sequence[int], now: float) -> None:
    sent = estimate.begin(chain, len(chain) * BLOCK_TOKENS, now)
    estimate.first_chunk(sent, now)
    estimate.end(sent, now)


def test_queued_tokens_decrease_with_time() -> None:
    estimate = make_estimate()
    estimate.begin((), 4000, now=0.0)
    estimate.begin((), 1000, now=0.0)
    assert [estimate.queued_tokens(now) for now in (0.0, 1.0, 4.0)] == [5000, 4000, 1000]


def test_an_overdue_prompt_will_still_take_a_while() -> None:
    """It should have been computed after 4 s: the longer it has taken, the longer it will still take."""
    estimate = make_estimate()
    estimate.begin((), 4000, now=0.0)
    estimate.begin((), 1000, now=0.0)
    assert estimate.queued_seconds(estimate.queued_work(9.0)) == pytest.approx(2.5 + 1.0, abs=0.02)
    assert estimate.queued_tokens(9.0) == pytest.approx(3500, rel=0.01)


def test_evicted_blocks_of_queued_prompts_are_counted_as_queued() -> None:
    """A prompt of 40 blocks was fully cached when it was sent. 30 of them are evicted before its prefill begins."""
    estimate = make_estimate()
    estimate.set_capacity(100 * BLOCK_TOKENS, room=2.0)
    idle, waiting = tuple(range(1000, 1060)), tuple(range(40))
    for chain in (idle, waiting, idle):
        was_computed(estimate, chain, 0.0)
    estimate.begin(waiting, 40 * BLOCK_TOKENS, now=1.0)
    assert estimate.queued_tokens(1.0) == 0
    estimate.cache.remove(waiting[:11])
    assert estimate.queued_tokens(1.0) == 30 * BLOCK_TOKENS
    assert estimate.predict_cache(idle, 100 * BLOCK_TOKENS, now=1.0).matched == 30, "it makes way for them"
    assert estimate.queued_tokens(1.0) == 30 * BLOCK_TOKENS, "they are counted once"


def test_a_call_that_does_not_stream_is_queued_only_while_its_prompt_is_computed() -> None:
    estimate = make_estimate()
    sent = estimate.begin((), 2000, now=0.0, streams=False)
    assert estimate.queued_tokens(1.0) == 1000
    assert estimate.queued_tokens(3.0) == 0
    estimate.begin((), 1000, now=4.0)
    assert estimate.queued_tokens(4.5) == 500, "the next prompt is computed at once"
    for now in range(20, 60, 5):
        estimate.queued_tokens(float(now))
    assert estimate.in_flight == 2
    estimate.first_chunk(sent, 60.0)
    estimate.end(sent, 60.0, output_tokens=50)
    assert estimate.in_flight == 1


def test_calls_that_do_not_stream_end_their_prefills_in_the_order_of_their_predictions() -> None:
    """A later call may be due first, and a call may end before it is due."""
    estimate = make_estimate()
    long = estimate.begin((), 4000, now=0.0, streams=False)
    due = long.prefilled_by
    short = estimate.begin((), 40, now=0.0, streams=False)
    third = estimate.begin((), 40, now=0.0, streams=False)
    assert 0 < due < short.prefilled_by < third.prefilled_by
    assert estimate.queued_tokens(due - 0.01) > 80
    estimate.end(short, due - 0.01)
    assert estimate.queued_tokens(due + 0.001) <= 40
    assert estimate.queued_tokens(third.prefilled_by) == 0
    alone = estimate.begin((), 4000, now=third.prefilled_by + 1, streams=False)
    assert estimate.queued_tokens(alone.prefilled_by) == 0


def test_a_shared_prefill_is_found_among_the_queued_prompts_that_are_long_enough() -> None:
    estimate, chain = make_estimate(), tuple(range(100))
    first = estimate.begin(chain, 100 * BLOCK_TOKENS, now=0.0)
    estimate.begin(chain[:10], 10 * BLOCK_TOKENS, now=0.0)
    assert estimate.queue.find_shared(chain, 50.0 * BLOCK_TOKENS) is first
    assert estimate.queue.find_shared(chain, 101.0 * BLOCK_TOKENS) is None
    estimate.first_chunk(first, 1.0)
    assert estimate.queue.find_shared(chain, 50.0 * BLOCK_TOKENS) is None
    third = estimate.begin((*chain[:50], 1000), 51 * BLOCK_TOKENS, now=1.0)
    assert estimate.queue.find_shared((*chain[:50], 1000), float(BLOCK_TOKENS)) is third


def test_a_queued_prompt_is_computed_after_those_before_it() -> None:
    estimate = make_estimate()
    prompts = [estimate.begin((), tokens, now=0.0) for tokens in (4000, 1000, 2000)]
    for now, expected in ((0.0, [4, 5, 7]), (1.0, [3, 4, 6])):
        seconds = [estimate.queue.seconds_until(prompt, now) for prompt in prompts]
        assert seconds == pytest.approx(expected, abs=0.05)
