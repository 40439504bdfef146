"""How the strategies rank deployments."""

from __future__ import annotations

import random

import msgspec
import pytest
import xxhash

from gateway.deployments.fleet import Fleet
from gateway.deployments.state import DeploymentState
from gateway.prefix.estimate import Estimate
from gateway.prefix.events.base import BlocksStored
from gateway.prefix.events.block_index import BlockIndex
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.prefix.fleet_traffic import speed_of
from gateway.prefix.in_flight import NO_PEER_LOAD, PeerLoad
from gateway.prefix.staying import STAY_ERRORS, STAY_MAX_SECONDS
from gateway.providers.offline import OfflineProvider
from gateway.routing.base import ServingStrategy
from gateway.routing.jump_hash import jump_hash
from gateway.routing.least_busy import LeastBusy
from gateway.routing.prefix_affinity import PIN_SECONDS, PrefixAffinity
from gateway.routing.round_robin import RoundRobin
from gateway.routing.shortlist import COMPARED_MAX, SHORTLIST
from gateway.simulator.site import default_policy
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat

LONG = chat("All the world is a stage, and all the men and women merely players. " * 200)


def make_deployments() -> tuple[DeploymentState, DeploymentState]:
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(a_policy())
    a, b = fleet
    return a, b


def prompt_of(tokens: int) -> Call:
    """A call that shares no prefix with others."""
    return msgspec.structs.replace(a_call(), fingerprint=(), prompt_tokens_estimate=tokens)


def test_the_deployment_with_the_cached_prefix_wins() -> None:
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    best, other = PrefixAffinity().order(call, [a, b], now=0.0)
    assert best.deployment is b
    assert best.matched_tokens == len(call.fingerprint) * BLOCK_TOKENS
    assert best.cost_seconds < other.cost_seconds
    assert f"{best.matched_tokens} of {call.prompt_tokens_estimate} prompt tokens predicted in cache" in best.reason


def test_enough_queued_work_outweighs_a_cached_prefix() -> None:
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    b.send(prompt_of(call.prompt_tokens_estimate // 2), now=0.0)
    assert PrefixAffinity().order(call, [a, b], now=0.0)[0].deployment is b  # recomputing would cost more than waiting
    b.send(prompt_of(call.prompt_tokens_estimate), now=0.0)
    assert PrefixAffinity().order(call, [a, b], now=0.0)[0].deployment is a


def next_turn(call: Call) -> Call:
    """A call with this one's prompt and two blocks more."""
    chain = (*call.fingerprint, 1, 2)
    return msgspec.structs.replace(call, fingerprint=chain, prompt_tokens_estimate=len(chain) * BLOCK_TOKENS)


def set_errors(seconds: float, *deployments: DeploymentState) -> None:
    for deployment in deployments:
        deployment.estimate.speed.error_seconds = seconds


def test_a_conversation_moves_if_it_gains_more_than_predictions_err() -> None:
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    turn = next_turn(call)
    b.send(prompt_of(2 * call.prompt_tokens_estimate), now=0.0)
    costs = {one.deployment: one.cost_seconds for one in PrefixAffinity().order(turn, [a, b], now=0.0)}
    gain_seconds = costs[b] - costs[a]
    assert 0 < gain_seconds < STAY_MAX_SECONDS
    set_errors(0.9 * gain_seconds / STAY_ERRORS, a, b)
    assert PrefixAffinity().order(turn, [a, b], now=0.0)[0].deployment is a
    set_errors(1.1 * gain_seconds / STAY_ERRORS, a, b)
    best, other = PrefixAffinity().order(turn, [a, b], now=0.0)
    assert best.deployment is b
    assert other.cost_seconds == costs[a], "only the conversation's own deployment is cheaper"
    set_errors(1_000.0, a, b)
    assert PrefixAffinity().order(turn, [a, b], now=0.0)[0].cost_seconds == pytest.approx(costs[b] - STAY_MAX_SECONDS)
    set_errors(0.0, a)
    assert PrefixAffinity().order(turn, [a, b], now=0.0)[0].deployment is a, "only its own predictions err: it is ill"


def test_what_conversations_have_in_common_keeps_none_at_a_deployment() -> None:
    """Two others have the same beginning, so this is the next turn of neither."""
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    turn = next_turn(call)
    for number in (3, 4):
        b.cache.add((*call.fingerprint, number))
    exact = [one.cost_seconds for one in PrefixAffinity().order(turn, [a, b], now=0.0)]
    set_errors(1.0, a, b)
    assert [one.cost_seconds for one in PrefixAffinity().order(turn, [a, b], now=0.0)] == exact


def test_a_conversation_may_leave_a_cache_without_room() -> None:
    a, b = make_deployments()
    call = a_call(LONG)
    turn = next_turn(call)
    b.cache.add(call.fingerprint)
    b.cache.resize((len(call.fingerprint) + 1) * BLOCK_TOKENS)
    exact = [one.cost_seconds for one in PrefixAffinity().order(turn, [a, b], now=0.0)]
    set_errors(1.0, a, b)
    assert [one.cost_seconds for one in PrefixAffinity().order(turn, [a, b], now=0.0)] == exact


def test_a_busy_deployment_computes_only_what_saves_much() -> None:
    """A second of computation delays the calls behind it: as many as usually wait."""
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    busy, queued = prompt_of(call.prompt_tokens_estimate), prompt_of(2 * call.prompt_tokens_estimate)
    idle_a, idle_b = make_deployments()
    idle_b.cache.add(call.fingerprint)
    idle_b.send(queued, now=0.0)
    assert PrefixAffinity().order(call, [idle_a, idle_b], now=0.0)[0].deployment is idle_a
    for deployment in (a, b):
        for sent in [deployment.send(busy, now=0.0) for _ in range(10)]:
            sent.first_chunk(100.0)
            sent.end(100.0)
    b.send(queued, now=100.0)
    assert PrefixAffinity().order(call, [a, b], now=100.0)[0].deployment is b


def test_a_long_prompt_delays_no_more_calls_than_were_there_at_once() -> None:
    """One conversation has sent many short calls to `a`, but waits with one of them at a time."""
    a, b = make_deployments()
    b.send(prompt_of(8_000), now=0.0)
    b.send(prompt_of(8_000), now=0.0)
    for number in range(200):
        sent = a.send(prompt_of(100), now=number / 10)
        sent.first_chunk(number / 10 + 0.09)
        sent.end(number / 10 + 0.1)

    def weight_of(tokens: int) -> float:
        """What each token of a prompt's work costs."""
        order = PrefixAffinity().order(prompt_of(tokens), [a, b], now=20.0)
        costs = {one.deployment: one.cost_seconds for one in order}
        return costs[a] / (tokens * (1 + a.estimate.speed.fitted_attention * tokens / 2))

    assert weight_of(20_000) == pytest.approx(weight_of(10_000), rel=0.1), "as much as for half as long a prompt"


def test_a_deployment_is_not_avoided_because_one_conversation_keeps_it_busy() -> None:
    """No call has waited there, so a prompt that is computed there delays none."""
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint[:-8])
    for start in range(100):
        sent = b.send(prompt_of(1000), now=float(start))
        sent.first_chunk(start + 1.0)
        sent.end(start + 1.0)
    for deployment in (a, b):
        assert deployment.estimate.busy_time(100.0).mean_waiting == 0
    assert PrefixAffinity().order(call, [a, b], now=100.0)[0].deployment is b


def test_calls_in_the_queue_are_delayed_too() -> None:
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(policy := a_policy())
    model, (a, b) = policy.models[0], fleet
    for deployment in (a, b):
        sent = deployment.send(prompt_of(1000), now=0.0)
        sent.first_chunk(100.0)
        sent.end(100.0)
    estimates = (a.estimate, b.estimate)
    traffic = a.estimate.traffic
    assert traffic.pressure(estimates, now=100.0)[0] == 0
    fleet.note_queued(model, 6)
    assert traffic.pressure(estimates, now=101.0)[0] == pytest.approx(3, rel=0.1)
    fleet.note_queued(model, 1000)
    assert traffic.pressure(estimates, now=102.0)[0] < 10, "as in a queue of random arrivals, at most"
    fleet.apply(policy)
    assert traffic.pressure(estimates, now=103.0)[0] == 0, "a reload may have removed the model"


def test_a_prompt_delays_fewer_calls_at_a_deployment_that_was_idle() -> None:
    """Both are idle now, and nothing is cached. More calls arrive at the one that was busy."""
    a, b = make_deployments()
    call = a_call(LONG)
    b.estimate.set_peer_load(PeerLoad(0, 1000), 0.0)
    b.estimate.set_peer_load(NO_PEER_LOAD, 100.0)
    idle, busy = PrefixAffinity().order(call, [a, b], now=100.0)
    assert idle.deployment is a
    assert busy.cost_seconds > 2 * idle.cost_seconds


def test_a_deployment_that_was_busy_counts_as_idle_after_a_pause_that_is_long_for_it() -> None:
    a, b = make_deployments()
    for start in range(30):  # both are busy half of the time, and one of two prompts waits
        for deployment in (a, b) if start < 20 else (a,):
            for sent in [deployment.send(prompt_of(500), now=float(start)) for _ in range(2)]:
                sent.first_chunk(start + 0.5)
                sent.end(start + 0.5)
    idle, busy = PrefixAffinity().order(prompt_of(4000), [a, b], now=30.0)
    assert idle.deployment is b
    assert busy.cost_seconds > 1.5 * idle.cost_seconds


def test_the_calls_of_another_gateway_are_no_pause() -> None:
    a, b = make_deployments()
    for start in range(20):
        for deployment in (a, b):
            sent = deployment.send(prompt_of(1000), now=float(start))
            sent.first_chunk(start + 0.5)
            sent.end(start + 0.5)
    b.estimate.set_peer_load(PeerLoad(1, 1000), 20.0)
    b.estimate.set_peer_load(NO_PEER_LOAD, 40.0)
    assert a.estimate.pace(41.0) == pytest.approx(2 / 21.5, rel=0.2)
    assert b.estimate.pace(41.0) == 1.0


def test_a_deployment_without_calls_is_taken_for_one_of_the_middle() -> None:
    estimates = [Estimate(1_000, 2_000.0) for _ in range(4)]
    for estimate, rate in zip(estimates, (9_000, 1_000, 3_000), strict=False):
        for _ in range(40):
            estimate.speed.learn(1, 10_000, 10_000 / rate)
    assert speed_of(estimates[3], estimates) is estimates[2].speed
    assert speed_of(estimates[0], estimates) is estimates[0].speed


def test_nothing_is_expected_of_evictions_that_an_engine_reports() -> None:
    """Without reports, what the model takes to be evicted may still be there."""
    a, b = make_deployments()
    call = a_call(LONG)
    blocks = len(call.fingerprint)
    for deployment in (a, b):
        deployment.cache.resize(blocks * BLOCK_TOKENS)
        deployment.cache.add(call.fingerprint)
        deployment.cache.add(tuple(range(blocks)))  # evicts it
    a.blocks = BlockIndex(a.cache)
    a.blocks.stored(BlocksStored(tuple(range(-10, 0)), None, BLOCK_TOKENS, "session"))
    assert a.blocks.reports_all_evictions
    by_name = {c.deployment: c for c in PrefixAffinity().order(call, [a, b], now=0.0)}
    assert by_name[a].matched_tokens == 0 < by_name[b].matched_tokens
    assert by_name[a].cost_seconds > by_name[b].cost_seconds


def test_a_prompt_is_computed_where_it_interrupts_few_answers() -> None:
    """Until answers have shown otherwise, an answer costs as much at either deployment."""
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    for deployment, answers in ((a, 3), (b, 4)):
        for _ in range(answers):
            deployment.send(prompt_of(0), now=0.0).first_chunk(0.0)
    warm, cold = PrefixAffinity().order(call, [a, b], now=0.0)
    assert warm.deployment is b
    idle_warm, idle_cold = PrefixAffinity().order(call, [*reversed(make_warm_pair(call))], now=0.0)
    assert cold.cost_seconds - warm.cost_seconds > 1.5 * (idle_cold.cost_seconds - idle_warm.cost_seconds)


def make_warm_pair(call: Call) -> tuple[DeploymentState, DeploymentState]:
    """Two idle deployments, of which the second has the call's prompt cached."""
    a, b = make_deployments()
    b.cache.add(call.fingerprint)
    return a, b


def test_a_popular_beginning_is_copied_early() -> None:
    """Every conversation begins with it, so it is no reason to send all of them to one deployment."""
    a, b = make_deployments()
    beginning = a_call(LONG).fingerprint
    for number in range(8):
        sent = b.send(msgspec.structs.replace(a_call(LONG), fingerprint=(*beginning, number)), now=0.0)
        sent.first_chunk(0.0)
        sent.end(0.0)
    call = msgspec.structs.replace(a_call(LONG), fingerprint=(*beginning, 1))
    b.send(prompt_of(call.prompt_tokens_estimate // 4), now=0.0)
    assert PrefixAffinity().order(call, [a, b], now=0.0)[0].deployment is a


def test_a_popular_beginning_is_not_copied_while_a_deployment_that_has_it_is_idle() -> None:
    """The call would wait until the beginning is computed again, for nothing."""
    a, b = make_deployments()
    beginning = a_call(LONG).fingerprint

    def call(*rest: int) -> Call:
        chain = (*beginning, *rest)
        return msgspec.structs.replace(
            a_call(LONG), fingerprint=chain, prompt_tokens_estimate=len(chain) * BLOCK_TOKENS
        )

    for number in range(8):
        sent = b.send(call(*range(100 * number, 100 * number + 40)), now=float(number))
        sent.first_chunk(number + 0.9)
        sent.end(number + 0.9)
    b.estimate.traffic.queued["m"] = 1  # so what is computed there delays another call
    assert PrefixAffinity().order(call(*range(8_000, 8_024)), [a, b], now=8.0)[0].deployment is b


def test_a_prefix_that_both_hold_decides_nothing() -> None:
    a, b = make_deployments()
    call = a_call(LONG)
    a.cache.add(call.fingerprint)
    b.cache.add(call.fingerprint)
    a.send(prompt_of(1), now=0.0)
    assert PrefixAffinity().order(call, [a, b], now=0.0)[0].deployment is b


def test_among_many_deployments_the_holder_is_found() -> None:
    """Only some are compared. The holder is one of them, although it is the busiest; all are candidates."""
    fleet = Fleet(lambda deployment: OfflineProvider())
    names = [f"d{number}" for number in range(60)]
    described = [{"name": name, "base_url": "http://d.invalid/v1", "model": "served"} for name in names]
    fleet.apply(a_policy(deployments=described, models=[{"name": "m", "deployments": names}]))
    deployments = list(fleet)
    call = a_call(LONG)
    deployments[37].send(call, now=0.0).end(now=0.0)
    deployments[37].send(prompt_of(1), now=0.0)
    candidates = PrefixAffinity().order(call, deployments, now=0.0)
    assert candidates[0].deployment is deployments[37]
    assert {candidate.deployment.name for candidate in candidates} == set(names)
    costs = [candidate.cost_seconds for candidate in candidates]
    assert costs == sorted(costs)


def test_a_deployment_that_failed_comes_last_for_a_while() -> None:
    a, b = make_deployments()
    call = a_call(LONG)
    b.cache.add(call.fingerprint)
    b.breaker.failed(0.0)
    assert PrefixAffinity().order(call, [a, b], now=0.1)[0].deployment is a
    assert PrefixAffinity().order(call, [a, b], now=60.0)[0].deployment is b
    b.breaker.succeeded(0.1)
    assert PrefixAffinity().order(call, [a, b], now=0.1)[0].deployment is b


def test_least_busy_compares_shares_of_slots() -> None:
    a, b = make_deployments()
    a.send(prompt_of(1), now=0.0)
    assert LeastBusy().order(a_call(), [a, b], now=0.0)[0].deployment is b


def test_ordering_changes_no_state() -> None:
    a, b = make_deployments()
    call = a_call(LONG)
    assert PrefixAffinity().order(call, [a, b], 0.0) == PrefixAffinity().order(call, [a, b], 0.0)
    assert len(a.cache) == len(b.cache) == 0


def test_a_session_name_pins_a_conversation_within_a_bound() -> None:
    a, b = make_deployments()
    named = msgspec.structs.replace(a_call(chat("short")), session="s")
    a.send(named, now=0.0).end(now=0.0)
    assert PrefixAffinity().order(named, [b, a], now=1.0)[0].deployment is a
    a.send(prompt_of(int(2 * PIN_SECONDS * a.estimate.prefill_tokens_per_second)), now=1.0)
    assert PrefixAffinity().order(named, [b, a], now=1.0)[0].deployment is b


def test_isolated_gateways_agree_on_a_new_session() -> None:
    for number in range(20):
        named = msgspec.structs.replace(a_call(), session=f"s{number}")
        chosen = {PrefixAffinity().order(named, one_gateways, now=0.0)[0].deployment.name
                  for one_gateways in (make_deployments(), make_deployments()[::-1])}  # fmt: skip
        assert len(chosen) == 1


def _new_home(session: str, deployments: list[DeploymentState]) -> Estimate:
    by_name = sorted(deployments, key=lambda deployment: deployment.name)
    return by_name[jump_hash(xxhash.xxh3_64_intdigest(session.encode()), len(by_name))].estimate


@pytest.mark.parametrize("seed", range(3))
def test_of_many_deployments_the_idle_ones_and_the_holders_are_compared(seed: int) -> None:
    rng, policy = random.Random(seed), default_policy(40)
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(policy)
    everything, strategy = fleet.deployments_of(policy.models[0]), PrefixAffinity()
    chains = [tuple(rng.getrandbits(63) for _ in range(rng.randrange(1, 40))) for _ in range(12)]
    for now in range(120):
        chain, session = rng.choice(chains)[: rng.randrange(1, 41)], f"s{rng.randrange(60)}"
        call = msgspec.structs.replace(
            a_call(), fingerprint=chain, prompt_tokens_estimate=len(chain) * BLOCK_TOKENS, session=session
        )
        deployments = rng.sample(everything, rng.randrange(COMPARED_MAX + 1, 41))
        known = {
            *everything[0].estimate.traffic.holders.find(chain),
            everything[0].working_set.home_of(session) or _new_home(session, deployments),
        }
        by_standing = sorted(deployments, key=lambda deployment: deployment.estimate.standing_seconds)
        others = [deployment for deployment in by_standing[SHORTLIST:] if deployment.estimate not in known]
        ordered = strategy.order(call, deployments, float(now))
        compared, rest = ordered[: len(ordered) - len(others)], ordered[len(ordered) - len(others) :]
        worst_seconds = max(candidate.cost_seconds for candidate in compared)
        assert [candidate.deployment for candidate in rest] == others
        assert [candidate.cost_seconds for candidate in rest] == [
            worst_seconds + deployment.estimate.standing_seconds for deployment in others
        ]
        assert {candidate.deployment for candidate in ordered} == {*deployments}
        sent = rng.choice(ordered[:6]).deployment.send(call, float(now))
        if rng.random() < 0.5:
            sent.first_chunk(now + 0.5)


def test_a_deployment_of_unknown_speed_is_assumed_to_be_average() -> None:
    """Its configured rate is ten times too low. By that rate, it would never get a call and never be measured."""
    a, b = make_deployments()
    for _ in range(50):
        a.estimate.speed.learn(1, 20_000, 1.0)
    a.send(prompt_of(1000), now=0.0)
    assert PrefixAffinity().order(a_call(LONG), [a, b], now=0.0)[0].deployment is b


def test_round_robin_takes_turns() -> None:
    a, b = make_deployments()
    chosen = []
    for now in range(4):
        deployment = RoundRobin().order(a_call(LONG), [a, b], now=float(now))[0].deployment
        deployment.send(a_call(LONG), float(now))
        chosen.append(deployment)
    assert chosen == [a, b, a, b]


def test_round_robin_does_not_make_up_missed_turns() -> None:
    a, b = make_deployments()
    for second in range(100):
        a.send(a_call(LONG), float(second))
    chosen = []
    for now in (100.0, 100.0, 101.0, 102.0):
        chosen.append(RoundRobin().order(a_call(LONG), [a, b], now=now)[0].deployment)
        chosen[-1].send(a_call(LONG), now)
    assert chosen == [b, a, b, a]


def test_the_deployment_with_idle_blocks_loses_less() -> None:
    """Both have had as many calls, but only b's blocks were used again."""
    a, b = make_deployments()
    for deployment in (a, b):
        deployment.blocks = BlockIndex(deployment.cache)
        deployment.blocks.stored(BlocksStored(tuple(range(100)), None, BLOCK_TOKENS))
        deployment.estimate.set_capacity(100 * BLOCK_TOKENS, room=2.0)
        deployment.cache.add(tuple(range(100)))
    for turn in range(50):
        a.cache.touch((-1 - turn,))
        b.cache.touch(tuple(range(100)))
    call = a_call(LONG)
    assert [candidate.deployment for candidate in PrefixAffinity().order(call, [b, a], now=0.0)] == [a, b]
    assert b.eviction_loss(640.0, 0.0) > 5 * a.eviction_loss(640.0, 0.0)


@pytest.mark.parametrize(
    "strategy", [PrefixAffinity(), LeastBusy(), RoundRobin()], ids=lambda each: type(each).__name__
)
def test_a_candidate_without_others_is_the_same_but_for_its_predicted_seconds(strategy: ServingStrategy) -> None:
    a, _ = make_deployments()
    call = a_call(LONG)
    a.send(call, now=0.0)
    (ordered,) = strategy.order(call, [a], now=0.1)
    only = strategy.only(call, a, now=0.1)
    seconds = {"cost_seconds": ordered.cost_seconds, "ttft_seconds": ordered.ttft_seconds}
    assert msgspec.structs.replace(only, **seconds) == ordered
    assert only.reason == ordered.reason
