"""Replays: virtual times computed by hand, and bounds on the results of the strategies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.round_robin import RoundRobin
from gateway.simulator import baselines, generate
from gateway.simulator.compare import (
    OURS,
    POOLED,
    STRATEGIES,
    StrategySummary,
    compare,
    prefill_rate_for_load,
)
from gateway.simulator.engine_steps import EngineSpeed
from gateway.simulator.plot import bar_chart
from gateway.simulator.replay import Replay
from gateway.simulator.site import Reports, Restart, SimulatedSite, default_policy
from gateway.simulator.traces import TraceRequest, TraceSession, TrafficTrace, staggered

pytestmark = pytest.mark.slow

BLOCKS = range(10)
BASELINES = [name for name in STRATEGIES if name not in (OURS, POOLED)]


def make_site(servers: int, capacity_tokens: int, rate: float, **deployment: object) -> SimulatedSite:
    return SimulatedSite(default_policy(servers, **deployment), capacity_tokens, EngineSpeed.of_rate(rate))


def single_request(at: float, tokens: int = 640, blocks: range = BLOCKS, output: int = 50) -> TraceSession:
    return TraceSession("s", at, (TraceRequest(0.0, tokens, output, (blocks,)),))


def test_times_equal_those_computed_by_hand() -> None:
    """Equal prompts, the second one after the first: the last block again. Then a step per output token."""
    trace = TrafficTrace("t", [single_request(0.0), single_request(10.0)], closed_loop=False)
    result = Replay(trace, make_site(1, 10**6, 100.0), lambda _: RoundRobin(), holds=False).run()
    assert [request.first_chunk for request in result.requests] == pytest.approx([6.4, 10.64], abs=0.02)
    assert [request.cached_tokens for request in result.requests] == [0, 576]
    assert [request.finished - request.first_chunk for request in result.requests] == pytest.approx([0.98, 0.98], 0.01)


def test_engines_share_processors_with_requests_on_their_way_and_with_the_chunks_they_send() -> None:
    """Two processors, three engines with a request each, and constants by which every phase is easy to compute."""
    timing = EngineSpeed(0.1, 0.01, 0.0, request=0.2, chunk=0.05)
    sessions = [single_request(0.0, 100, range(number, number + 1), output=11) for number in range(3)]
    trace = TrafficTrace("t", sessions, closed_loop=False)
    site = SimulatedSite(default_policy(3), 10**6, timing, processors=2.0)
    result = Replay(trace, site, lambda _: RoundRobin(), holds=False).run()
    # The third request sets out with two others on their way. The prefills of 1.1 s then share two processors.
    first_chunks = [request.first_chunk for request in result.requests]
    assert max(first_chunks) == pytest.approx(0.3 + 1.1 * 3 / 2, abs=0.1)
    # Ten steps of 0.1 s, beside which 0.05 s of chunks are sent: 4.5 processors would be used.
    assert max(request.finished for request in result.requests) == pytest.approx(max(first_chunks) + 4.5 / 2, abs=0.1)
    alone = Replay(trace, replace(site, processors=None), lambda _: RoundRobin(), holds=False).run()
    assert [request.finished for request in alone.requests] == pytest.approx([0.2 + 1.1 + 1.0] * 3)


def test_a_routers_wait_delays_each_request_and_uses_no_processor() -> None:
    timing = EngineSpeed(0.1, 0.01, 0.0, request=0.2, chunk=0.05)
    trace = TrafficTrace("t", [single_request(0.0), single_request(0.0)], closed_loop=False)
    finished = []
    for wait in (0.0, 0.5):
        site = SimulatedSite(default_policy(2), 10**6, replace(timing, wait=wait), processors=1.0)
        result = Replay(trace, site, lambda _: RoundRobin(), holds=False).run()
        finished.append([request.finished for request in result.requests])
    assert finished[1] == pytest.approx([seconds + 0.5 for seconds in finished[0]])


def test_a_sessions_next_request_arrives_after_the_answer_and_a_pause() -> None:
    requests = [TraceRequest(0.0, 640, 50, (BLOCKS,)), TraceRequest(30.0, 1280, 50, (range(20),))]
    trace = TrafficTrace("t", [TraceSession("s", 5.0, requests)], closed_loop=True)
    result = Replay(trace, make_site(1, 10**6, 100.0), lambda _: RoundRobin(), holds=False).run()
    first, second = result.requests
    assert second.arrived == pytest.approx(first.finished + 30.0)
    assert second.cached_tokens == 640


def test_the_next_turn_finds_the_blocks_that_the_answer_completed() -> None:
    requests = [TraceRequest(0.0, 640, 129, (BLOCKS,)), TraceRequest(0.0, 1280, 1, (range(20),))]
    trace = TrafficTrace("t", [TraceSession("s", 0.0, requests)], closed_loop=True)
    result = Replay(trace, make_site(1, 10**6, 100.0), lambda _: RoundRobin(), holds=False).run()
    assert result.requests[1].cached_tokens == 640 + 128


def test_a_request_without_a_free_slot_is_queued() -> None:
    trace = TrafficTrace("t", [single_request(0.0), single_request(0.0, blocks=range(50, 60))], closed_loop=False)
    result = Replay(trace, make_site(1, 10**6, 100.0, max_concurrency=1), lambda _: RoundRobin(), holds=False).run()
    first, second = result.requests
    assert second.sent == first.finished


@pytest.mark.parametrize("reports", Reports)
def test_the_router_sees_what_the_engines_report(reports: Reports) -> None:
    trace = generate.conversation(5, chats=300, duration_seconds=150.0)
    site = replace(make_site(2, 200_000, prefill_rate_for_load(trace, 2, 0.6)), reports=reports)
    replay = Replay(trace, site, lambda _: PrefixAffinity(), holds=True)
    result = replay.run()
    assert len(result.requests) == trace.requests
    learned = set(result.learned_capacity_tokens)
    if reports is Reports.EVENTS:
        assert learned == {2 * 200_000 // BLOCK_TOKENS * BLOCK_TOKENS}, "by the metrics, with room"
    elif reports is Reports.NOTHING:
        assert all(130_000 <= tokens <= 300_000 for tokens in learned), "near the truth, by the times of prompts"


def summaries(trace: TrafficTrace, site: SimulatedSite, *names: str) -> dict[str, StrategySummary]:
    return {summary.strategy: summary for summary in compare(trace, site, names or list(STRATEGIES))}


@pytest.mark.parametrize(("seed", "servers"), [(1, 4), (2, 8)])
def test_on_chats_the_router_is_close_to_a_pooled_cache(seed: int, servers: int) -> None:
    trace = generate.conversation(seed, chats=600, duration_seconds=300.0)
    by_name = summaries(trace, make_site(servers, 500_000, prefill_rate_for_load(trace, servers, 0.75)))
    ours = by_name[OURS]
    assert ours.hit_rate >= by_name[POOLED].hit_rate - 0.025
    assert ours.ttft_mean_seconds <= 1.3 * min(by_name[name].ttft_mean_seconds for name in BASELINES)
    assert ours.load_ratio <= 1.3


@pytest.mark.parametrize("urgent_every", [None, 10])
def test_agents_that_do_not_fit_are_held_and_finish_sooner(urgent_every: int | None) -> None:
    made = generate.agents(1, sessions=60, max_requests=40)
    trace = staggered(made, seed=1, start_every_seconds=5.0, urgent_every=urgent_every)
    by_name = summaries(trace, make_site(2, 600_000, 8_000.0), OURS, "round robin", "sglang-router")
    ours = by_name[OURS]
    assert ours.hit_rate >= 0.88
    assert ours.makespan_seconds < min(by_name[name].makespan_seconds for name in ("sglang-router", "round robin"))
    assert ours.load_ratio <= 1.3
    assert ours.urgent_held == 0
    if urgent_every:
        assert ours.urgent_hit_rate is not None and ours.urgent_hit_rate >= 0.88


def test_cache_aware_follows_the_longest_match_until_the_loads_differ() -> None:
    """The common beginning covers more than the threshold, so all go to one engine, and after 65 to the other one."""
    requests = [TraceSession(f"{n}", 0.0, (TraceRequest(0.0, 640, 5, (range(8), range(100 * n, 100 * n + 2))),))
                for n in range(1, 80)]  # fmt: skip
    result = Replay(TrafficTrace("t", requests, False), make_site(2, 10**6, 100.0),
                    lambda _: baselines.CacheAware(10**6), holds=False).run()  # fmt: skip
    assert sorted(Counter(request.deployment for request in result.requests).values()) == [14, 65]


def test_llm_d_and_dynamo_see_what_the_engines_have_cached() -> None:
    """A conversation returns to its engine although another prompt has made the other one the last used."""
    turns = [TraceRequest(0.0, 640, 5, (BLOCKS,)), TraceRequest(30.0, 768, 5, (range(12),))]
    trace = TrafficTrace("t", [TraceSession("s", 0.0, turns), single_request(10.0, blocks=range(50, 60))], True)
    for made in (baselines.WeightedScorers, baselines.AffinityFilter, baselines.DynamoCost):
        result = Replay(trace, make_site(2, 10**6, 1000.0), made, holds=False).run()
        assert result.requests[-1].cached_tokens == 640


def test_a_deployment_that_joins_later_gets_requests_from_then_on() -> None:
    trace = TrafficTrace("t", [single_request(10.0 * n, blocks=range(100 * n, 100 * n + 10)) for n in range(10)], False)
    site = replace(make_site(2, 10**6, 1000.0), joins_at_seconds=45.0, reports=Reports.EVENTS)
    result = Replay(trace, site, lambda _: RoundRobin(), holds=False).run()
    assert [request.deployment for request in result.requests][:5] == [0] * 5
    assert [request.deployment for request in result.requests][5:].count(1) in (2, 3)


def test_the_pool_has_the_cache_of_a_deployment_that_joins_from_then_on() -> None:
    trace = TrafficTrace("t", [single_request(0.0), single_request(60.0)], closed_loop=False)
    site = replace(make_site(4, 640_000, 1000.0), joins_at_seconds=45.0)
    replay = Replay(trace, site, STRATEGIES[POOLED], holds=False, pooled=True)
    (cache,) = {engine.cache for engine in replay.result.engines}
    assert cache.capacity == 30_000
    replay.run()
    assert cache.capacity == 40_000


def test_a_restarted_engine_has_lost_its_cache_and_computes_its_requests_again() -> None:
    trace = TrafficTrace("t", [single_request(0.0), single_request(20.0), single_request(31.0)], closed_loop=False)
    site = replace(make_site(1, 10**6, 100.0), restarts=(Restart(32.0, 0, seconds=5.0),))
    first, second, third = Replay(trace, site, lambda _: RoundRobin(), holds=False).run().requests
    assert (first.cached_tokens, second.cached_tokens) == (0, 576)
    assert third.finished > 32.0 + 5.0 + 6.4


def test_two_gateways_with_replica_sync_are_close_to_one() -> None:
    trace = generate.conversation(1, chats=1200, duration_seconds=600.0)
    alone = make_site(4, 500_000, prefill_rate_for_load(trace, 4, 0.75))
    one, two, two_strangers = (
        summaries(trace, site, OURS)[OURS].hit_rate
        for site in (
            alone,
            replace(alone, gateways=2),
            replace(alone, gateways=2, syncs=False),
        )
    )
    assert two >= one - 0.015
    assert two_strangers < one - 0.03


def test_wrong_guesses_of_capacity_and_rate_cost_little() -> None:
    trace = generate.conversation(3, chats=1200, duration_seconds=600.0)
    rate = prefill_rate_for_load(trace, 4, 0.75)
    rates = [
        summaries(trace, make_site(4, 1_000_000, rate, cache_tokens=guess, prefill_tokens_per_second=speed), OURS)[OURS]
        for guess, speed in ((1_000_000, int(rate)), (100_000, 100), (20_000_000, 10**6))
    ]
    exact, *guessed = rates
    assert all(one.hit_rate >= exact.hit_rate - 0.015 for one in guessed)


def test_parallel_processes_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.simulator.compare.REQUESTS_PER_PROCESS", 1)
    trace, site = generate.conversation(1, chats=50, duration_seconds=60.0), make_site(2, 10**6, 8_000.0)
    assert list(compare(trace, site, list(STRATEGIES), processes=2)) == list(compare(trace, site, list(STRATEGIES)))


def test_the_chart_has_a_bar_for_each_strategy() -> None:
    trace = generate.conversation(1, chats=50, duration_seconds=60.0)
    made = list(compare(trace, make_site(2, 10**6, 8_000.0), list(STRATEGIES)))
    chart = bar_chart("<title>", made)
    assert chart.startswith("<svg ") and "&lt;title&gt;" in chart
    assert chart.count("<rect ") == 1 + 3 * len(STRATEGIES)


def test_conversations_take_their_blocks_along_if_engines_load_them() -> None:
    """Three agents share two servers. Each call finds its prompt wherever it goes, and there is one copy of it."""
    sessions = [
        TraceSession(
            f"s{number}",
            0.0,
            [
                TraceRequest(0.0, 640 * turn, 1, (range(1000 * number, 1000 * number + 10 * turn),))
                for turn in (1, 2, 3)
            ],
        )
        for number in range(3)
    ]
    trace = TrafficTrace("t", sessions, closed_loop=True, concurrency=3, answers_repeat=False)
    timing = replace(EngineSpeed.of_rate(2000.0), load=0.01, load_token=1e-5)
    found = {}
    for rate in (None, 100_000):
        policy = default_policy(2, provider="warmpath", max_concurrency=1, kv_transfer_tokens_per_second=rate)
        result = Replay(trace, SimulatedSite(policy, 10**6, timing), lambda _: PrefixAffinity(), holds=True).run()
        found[rate] = result
        assert len({request.deployment for request in result.requests}) == 2
    cached = {rate: sum(request.cached_tokens for request in result.requests) for rate, result in found.items()}
    assert cached[100_000] == 3 * (640 - 64 + 1280 - 64 + 128) > cached[None]
    assert sum(engine.cache.findable for engine in found[100_000].engines) == 3 * 30
    with_loads = sum(request.first_chunk - request.arrived for request in found[100_000].requests)
    assert with_loads < sum(request.first_chunk - request.arrived for request in found[None].requests)
