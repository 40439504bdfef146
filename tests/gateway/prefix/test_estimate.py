"""What a deployment's estimates learn from calls, responses and reports, and what they predict."""

from __future__ import annotations

import random

import pytest

from gateway.prefix.estimate import LOAD_VALID_SECONDS, Estimate
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.in_flight import NO_PEER_LOAD, PeerLoad, ReportedLoad

LONG = tuple(range(100))
TOKENS = len(LONG) * BLOCK_TOKENS


def make_estimate(capacity_blocks: int = 1000) -> Estimate:
    return Estimate(capacity_blocks * BLOCK_TOKENS, prefill_tokens_per_second=1000)


def answered_call(estimate: Estimate, chain: tuple[int, ...], now: float, cached_blocks: int) -> None:
    """A call, from its sending to the usage that its response reports."""
    tokens = len(chain) * BLOCK_TOKENS
    sent = estimate.begin(chain, tokens, now)
    estimate.first_chunk(sent, now)
    estimate.learn_cached(sent, tokens, cached_blocks * BLOCK_TOKENS)
    estimate.end(sent, now)


def test_the_rate_is_learned_while_prompts_queue() -> None:
    """The second prompt is queued behind the first, so its time to the first chunk includes the first one's prefill."""
    estimate = make_estimate()
    for start in range(0, 400, 4):
        one = estimate.begin((), 4000, start)
        other = estimate.begin((), 4000, start)
        estimate.first_chunk(one, start + 2)
        estimate.first_chunk(other, start + 4)
        estimate.end(one, start + 4)
        estimate.end(other, start + 4)
    assert estimate.prefill_tokens_per_second == pytest.approx(2000, rel=0.05)


def test_prompts_that_are_computed_together_do_not_look_fast() -> None:
    """Four prompts of 1,000 tokens share their steps, so their first chunks arrive together, after two seconds."""
    estimate = make_estimate()
    for start in range(0, 400, 4):
        sent = [estimate.begin((), 1000, start + i / 100) for i in range(4)]
        for i, prompt in enumerate(sent):
            estimate.first_chunk(prompt, start + 2 + i / 1000)
        for prompt in sent:
            estimate.end(prompt, start + 3)
        assert estimate.prefill_tokens_per_second < 2500


def test_the_rate_is_not_lowered_while_peers_have_queued_tokens() -> None:
    estimate = make_estimate()
    estimate.speed.learn(1, 4000, 4.0)
    for others in (PeerLoad(1, 4000), NO_PEER_LOAD):
        before = estimate.prefill_tokens_per_second
        sent = estimate.begin((), 4000, 0.0)
        estimate.set_peer_load(others, 0.0)
        estimate.first_chunk(sent, 8.0)
        estimate.end(sent, 8.0)
        assert (estimate.prefill_tokens_per_second < before) == (others is NO_PEER_LOAD)
        estimate.set_peer_load(NO_PEER_LOAD, 8.0)


def test_without_reports_only_unknown_prompts_teach_the_rate() -> None:
    """A prompt that was sent before may be cached or not, so its time says nothing."""
    estimate = make_estimate()
    for at, learns in ((0.0, True), (10.0, False)):
        before = estimate.prefill_tokens_per_second
        sent = estimate.begin(LONG, TOKENS, at)
        estimate.first_chunk(sent, at + 1.6)
        estimate.end(sent, at + 2.0)
        assert (estimate.prefill_tokens_per_second != before) == learns


def test_busy_time_is_the_time_in_which_prompts_are_computed() -> None:
    estimate = make_estimate()
    for start in range(200):
        sent = estimate.begin((), 100, float(start))
        estimate.first_chunk(sent, start + 0.25)
        estimate.end(sent, start + 0.75)
    assert estimate.busy_time(200.0).share == pytest.approx(0.25, abs=0.02)
    assert estimate.busy_time(300.0).share < 0.01


def test_prompts_that_wait_until_others_are_computed_are_counted() -> None:
    estimate = make_estimate()
    for start in range(200):  # one waits half of the time, and another one a quarter of the time
        for after, sent in [(0.25 * number, estimate.begin((), 100, float(start))) for number in (1, 2, 3)]:
            estimate.first_chunk(sent, start + after)
            estimate.end(sent, start + 0.75)
    assert estimate.busy_time(200.0).mean_waiting == pytest.approx(0.75, abs=0.05)


def test_the_most_calls_at_once_are_remembered_for_a_while() -> None:
    estimate = make_estimate()
    for sent in [estimate.begin((), 100, 0.0) for _ in range(8)]:
        estimate.first_chunk(sent, 0.1)
        estimate.end(sent, 0.1)
    assert estimate.busy_time(0.1).most_calls == pytest.approx(8, abs=0.1)
    estimate.begin((), 100, 1.0)
    assert estimate.busy_time(1.0).most_calls == pytest.approx(8, abs=0.5)
    assert estimate.busy_time(100.0).most_calls == 1, "the one that is there"


def test_the_prompts_of_peers_wait_too() -> None:
    """Their number is guessed by their tokens."""
    estimate = make_estimate()
    for _ in range(100):
        estimate.first_chunk(estimate.begin((), 1000, 0.0), 0.0)
    estimate.set_peer_load(PeerLoad(3, round(3 * estimate.mean_work)), 0.0)
    assert estimate.busy_time(200.0).mean_waiting == pytest.approx(2, abs=0.01)


def test_a_failed_call_leaves_nothing_in_the_cache() -> None:
    estimate = make_estimate()
    answered_call(estimate, LONG[:40], 0.0, cached_blocks=0)
    estimate.end(estimate.begin(LONG, TOKENS, now=1.0), now=2.0, answered=False)
    assert estimate.cache.match(LONG) == 40
    assert (estimate.in_flight, estimate.queue.tokens) == (0, 0)


def test_one_response_reveals_a_restart_and_keeps_the_capacity() -> None:
    estimate = make_estimate()
    answered_call(estimate, LONG, 0.0, cached_blocks=0)
    answered_call(estimate, LONG, 1.0, cached_blocks=len(LONG))  # so the deployment reports cached tokens
    for first in range(1000, 1005):
        answered_call(estimate, tuple(range(first, first + 10)), 2.0, cached_blocks=0)
    answered_call(estimate, LONG, 3.0, cached_blocks=len(LONG))
    answered_call(estimate, tuple(range(1004, 1014)), 4.0, cached_blocks=0)
    assert estimate.cache.match(tuple(range(1000, 1010))) == 0, "was used before, and so is gone, too"
    assert estimate.cache.match(LONG) == len(LONG), "has been used since"
    assert estimate.cache.capacity >= 900


def test_a_block_that_is_found_shows_that_newer_ones_are_not_lost() -> None:
    estimate = make_estimate()
    prompts = [tuple(range(first, first + 10)) for first in range(0, 5000, 1000)]
    for at, prompt in enumerate(prompts):
        answered_call(estimate, prompt, float(at), cached_blocks=0)
    answered_call(estimate, prompts[-1], 6.0, cached_blocks=0)
    answered_call(estimate, prompts[-1], 7.0, cached_blocks=10)  # so the deployment reports cached tokens
    answered_call(estimate, prompts[3], 8.0, cached_blocks=0)  # for a reason of its own
    assert not estimate.cache.match(prompts[2])
    answered_call(estimate, prompts[1], 9.0, cached_blocks=10)
    assert estimate.cache.match(prompts[2]) and not estimate.cache.match(prompts[0])


def test_zero_is_ignored_if_a_deployment_never_reports_cached_tokens() -> None:
    estimate = make_estimate()
    for now in range(5):
        answered_call(estimate, LONG, now, cached_blocks=0)
    assert estimate.cache.match(LONG) == len(LONG)


def test_a_miss_on_a_prefix_that_was_being_computed_is_ignored() -> None:
    estimate = make_estimate()
    answered_call(estimate, (7, 8, 9), 0.0, cached_blocks=3)
    leader = estimate.begin(LONG, TOKENS, now=1.0)
    follower = estimate.begin(LONG, TOKENS, now=1.1)
    assert estimate.queue.find_shared(LONG) is leader
    estimate.first_chunk(leader, 2.0)
    estimate.learn_cached(follower, TOKENS, 0)
    assert estimate.cache.match((7, 8, 9)) == 3


def test_a_miss_shows_an_eviction_also_while_prompts_queue() -> None:
    """The prefix was computed long ago. That another prompt with it is queued does not make the miss meaningless."""
    estimate = make_estimate()
    answered_call(estimate, (7, 8, 9), 0.0, cached_blocks=3)
    answered_call(estimate, LONG, 1.0, cached_blocks=0)
    estimate.begin(LONG, TOKENS, now=2.0)
    follower = estimate.begin(LONG, TOKENS, now=2.1)
    estimate.learn_cached(follower, TOKENS, 0)
    assert estimate.cache.match((7, 8, 9)) == 0, "it was used before the prefix, so it is gone, too"
    for _ in range(9):
        answered_call(estimate, LONG, 3.0, cached_blocks=0)
    assert estimate.cache.capacity < 1000, "one response does not show it, but several do"


@pytest.mark.parametrize("guess", [60, 300, 3000])
def test_the_capacity_is_learned_from_responses(guess: int) -> None:
    """An LRU cache of 600 blocks. Half of the prompts return, after few or many others."""
    truth, estimate, rng = make_estimate(600).cache, make_estimate(guess), random.Random(1)
    for turn in range(4000):
        number = turn if rng.random() < 0.5 else max(0, turn - int(2 ** rng.uniform(0, 9)))
        chain = tuple(range(number * 100, number * 100 + 10))
        cached = truth.match(chain)
        truth.add(chain)
        answered_call(estimate, chain, float(turn), cached)
    assert estimate.cache.capacity == pytest.approx(600, rel=0.15)


def test_a_reported_capacity_replaces_the_learned_one() -> None:
    estimate = make_estimate(1000)
    estimate.set_capacity(50 * BLOCK_TOKENS)
    assert estimate.cache.capacity == 50
    answered_call(estimate, LONG, 0.0, cached_blocks=50)
    answered_call(estimate, LONG, 1.0, cached_blocks=0)
    assert estimate.cache.capacity == 50


def test_a_reported_load_counts_while_it_is_recent() -> None:
    estimate = make_estimate()
    estimate.begin(LONG, TOKENS, now=0.0)
    assert estimate.total_in_flight(0.0) == 1
    estimate.load = ReportedLoad(at=1.0, running=5, waiting=2)
    assert estimate.total_in_flight(1.0 + LOAD_VALID_SECONDS) == 7
    assert estimate.total_in_flight(1.1 + LOAD_VALID_SECONDS) == 1
    estimate.load = ReportedLoad(at=1.0, running=0, waiting=0)
    assert estimate.total_in_flight(1.0) == 1  # its report does not include this call yet


def test_evictions_by_queued_prompts_are_predicted() -> None:
    """A cache of 100 blocks is full when a prompt of 30 is sent. It will evict the least recently used ones."""
    estimate = make_estimate()
    estimate.set_capacity(100 * BLOCK_TOKENS, room=2.0)
    for first in (1000, 2000):
        answered_call(estimate, tuple(range(first, first + 50)), 0.0, cached_blocks=0)
    old, full = tuple(range(1000, 1050)), 100 * BLOCK_TOKENS
    assert estimate.predict_cache(old, full, now=1.0).matched == 50
    estimate.begin(tuple(range(30)), 30 * BLOCK_TOKENS, now=1.0)
    assert estimate.predict_cache(old, full, now=1.0).matched == 20
    assert estimate.predict_cache(old, full - 30 * BLOCK_TOKENS, now=1.0).matched == 50, "there is room for it"
    assert estimate.cache.match(old) == 50, "it has not happened yet"


def test_the_cache_of_an_idle_deployment_ages() -> None:
    """It had a call every second. After 39 idle seconds, its newest prompt is as old as after 39 other calls."""
    estimate = make_estimate()
    estimate.set_capacity(100 * BLOCK_TOKENS, room=2.0)
    for turn in range(200):
        answered_call(estimate, tuple(range(50)), float(turn), cached_blocks=50 if turn else 0)
    answered_call(estimate, tuple(range(1000, 1050)), 200.0, cached_blocks=0)
    full = 100 * BLOCK_TOKENS
    now, later = (estimate.eviction_loss(100 * BLOCK_TOKENS, full, at) for at in (200.0, 239.0))
    assert now > 0.8 * 100 * BLOCK_TOKENS
    assert later < 0.2 * now


@pytest.mark.parametrize("present_tokens", [0, None])
def test_what_fits_evicts_nothing(present_tokens: int | None) -> None:
    """With KV events and without."""
    estimate = make_estimate(100)
    if present_tokens is not None:
        estimate.set_capacity(100 * BLOCK_TOKENS)
    assert estimate.eviction_loss(100 * BLOCK_TOKENS, present_tokens, 0.0) == 0
    answered_call(estimate, tuple(range(60)), 0.0, cached_blocks=0)
    present_tokens = None if present_tokens is None else 60 * BLOCK_TOKENS
    assert estimate.eviction_loss(40 * BLOCK_TOKENS, present_tokens, 0.0) == 0
    assert estimate.eviction_loss(50 * BLOCK_TOKENS, present_tokens, 0.0) > 0


def test_responses_change_nothing_if_evictions_are_reported() -> None:
    estimate = make_estimate()
    answered_call(estimate, LONG, 0.0, 0)
    sent = estimate.begin(LONG, TOKENS, 1.0)
    estimate.first_chunk(sent, 1.0)
    estimate.learn_cached(sent, TOKENS, BLOCK_TOKENS, evictions_reported=True)
    assert estimate.cache.match(LONG) == len(LONG)


def test_busy_time_counts_only_the_prompts_of_calls_that_do_not_stream() -> None:
    estimate = make_estimate()
    for start in range(200):
        sent = estimate.begin((), 250, float(start), streams=False)
        estimate.end(sent, start + 0.99)
    assert estimate.busy_time(200.0).share == pytest.approx(0.25, abs=0.03)


def test_calls_that_do_not_stream_teach_how_long_prompts_are_computed() -> None:
    """The policy's guess is 1,000 tokens per second. The deployment computes 10,000, and decodes 50."""
    estimate = make_estimate()
    for number in range(40):
        start, tokens, output_tokens = number * 20.0, (8000, 1000)[number % 2], (20, 300)[number % 2]
        sent = estimate.begin((), tokens, start, streams=False)
        estimate.end(sent, start + tokens / 10_000 + output_tokens / 50, output_tokens=output_tokens)
    estimate.begin((), 8000, 1000.0, streams=False)
    assert estimate.queued_tokens(1000.5) > 0
    assert estimate.queued_tokens(1001.0) == 0
