from __future__ import annotations

from gateway.fleet import Fleet, Server
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.providers.base import Unasked
from gateway.routing.least_busy import LeastBusy
from gateway.routing.prefix_affinity import PrefixAffinity
from tests.gateway.calls import a_call, a_policy, chat

LONG = chat("All the world is a stage, and all the men and women merely players. " * 200)


def servers() -> tuple[Server, Server]:
    fleet = Fleet(lambda deployment: Unasked())
    fleet.apply(a_policy())
    a, b = fleet
    return a, b


def test_the_server_that_holds_the_prefix_wins() -> None:
    a, b = servers()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    best, other = PrefixAffinity().order(call, [a, b], now=0.0)
    assert best.server is b
    assert best.matched_tokens == len(call.fingerprint) * BLOCK_TOKENS
    assert best.cost_seconds < other.cost_seconds
    assert f"{best.matched_tokens} of {call.prompt_tokens_estimate} prompt tokens warm" in best.reason


def test_enough_queued_work_outweighs_a_warm_prefix() -> None:
    a, b = servers()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    b.prefill_tokens_queued = 2 * call.prompt_tokens_estimate
    assert PrefixAffinity().order(call, [a, b], now=0.0)[0].server is b  # recomputing would cost more than waiting
    b.prefill_tokens_queued = 4 * call.prompt_tokens_estimate
    assert PrefixAffinity().order(call, [a, b], now=0.0)[0].server is a


def test_what_both_hold_decides_nothing() -> None:
    a, b = servers()
    call = a_call(LONG)
    a.cache.add(call.fingerprint)
    b.cache.add(call.fingerprint)
    a.in_flight = 1
    assert PrefixAffinity().order(call, [a, b], now=0.0)[0].server is b


def test_a_server_that_failed_comes_last_until_it_has_cooled_down() -> None:
    a, b = servers()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    b.breaker.failed(0.0)
    assert PrefixAffinity().order(call, [a, b], now=0.1)[0].server is a
    assert PrefixAffinity().order(call, [a, b], now=60.0)[0].server is b
    b.breaker.succeeded(0.1)
    assert PrefixAffinity().order(call, [a, b], now=0.1)[0].server is b


def test_least_busy_is_by_share_of_places() -> None:
    a, b = servers()
    a.in_flight = 1
    assert LeastBusy().order(a_call(), [a, b], now=0.0)[0].server is b


def test_ordering_changes_nothing() -> None:
    a, b = servers()
    call = a_call(LONG)
    assert PrefixAffinity().order(call, [a, b], 0.0) == PrefixAffinity().order(call, [a, b], 0.0)
    assert len(a.cache) == len(b.cache) == 0


def test_a_belief_that_is_more_wrong_than_right_is_dropped() -> None:
    a, _ = servers()
    a.cache.add([1, 2, 3, 4, 5])
    a.learn_cached([1, 2, 3, 4, 5], predicted_tokens=5 * BLOCK_TOKENS, reported_tokens=0)
    assert len(a.cache) == 5  # it may be a server that never reports
    a.learn_cached([9], predicted_tokens=0, reported_tokens=10)
    a.learn_cached([1, 2], predicted_tokens=5 * BLOCK_TOKENS, reported_tokens=BLOCK_TOKENS)
    assert len(a.cache) == 2


def test_prefill_speed_is_learned_from_prompts_long_enough_to_tell() -> None:
    a, _ = servers()
    before = a.prefill_tokens_per_second
    a.learn_prefill(10, 0.001)
    assert a.prefill_tokens_per_second == before
    for _ in range(50):
        a.learn_prefill(1000, 0.1)
    assert abs(a.prefill_tokens_per_second - 10_000) < 100
