"""Hedged attempts: the first answer wins, and the other attempt is cancelled and cleaned up."""

from __future__ import annotations

import asyncio

import pytest

from gateway.routing.hedge_budget import SAMPLES_MIN
from tests.gateway.routing.rig import DONE, TEXT, Rig, Script, deployment_named, status, two_deployments


async def test_a_late_deployment_loses_to_the_hedge() -> None:
    a, b = Script(asyncio.Event()), Script(TEXT, DONE)
    rig = Rig(two_deployments(hedge={"after": "10ms", "budget": 1.0}), a=a, b=b)
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("a", "hedge_lost"), ("b", "ok")]
    assert (a.closed, b.closed) == (1, 1)
    assert rig.idle()
    assert not deployment_named(rig, "a").breaker.is_deprioritised(asyncio.get_running_loop().time())


async def test_the_first_attempt_may_still_win() -> None:
    late, b = asyncio.Event(), Script(asyncio.Event())
    rig = Rig(two_deployments(hedge={"after": "10ms", "budget": 1.0}), a=Script(late, TEXT, DONE), b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    late.set()
    assert await asking == [TEXT, DONE]
    assert rig.outcomes == [("b", "hedge_lost"), ("a", "ok")]
    assert rig.idle()


async def test_a_failed_hedge_does_not_end_the_first_attempt() -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)
    rig = Rig(
        two_deployments(hedge={"after": "10ms", "budget": 1.0}),
        a=Script(late, TEXT, DONE),
        b=Script(opener=status(500)),
    )
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("b", "status_500"), ("a", "ok")]
    assert rig.idle()


async def test_without_budget_no_call_is_hedged() -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)
    rig = Rig(two_deployments(hedge={"after": "10ms", "budget": 0.01}), a=Script(late, TEXT, DONE), b=Script(TEXT))
    rig.router._hedge_budget._budget = 0.0
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("a", "ok")]


async def test_a_cancelled_call_cancels_both_attempts() -> None:
    a, b = Script(asyncio.Event()), Script(asyncio.Event())
    rig = Rig(two_deployments(hedge={"after": "5ms", "budget": 1.0}), a=a, b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert sorted(rig.outcomes) == [("a", "client_gone"), ("b", "client_gone")]
    assert rig.idle()


async def test_the_hedge_delay_is_learned() -> None:
    rig = Rig(two_deployments(hedge={"after": "p95", "budget": 1.0}), a=Script(TEXT, DONE), b=Script(TEXT, DONE))
    hedge = rig.policy.classes["realtime"].hedge
    assert hedge is not None
    for _ in range(SAMPLES_MIN):
        assert rig.router._hedge_budget.delay_seconds(hedge, "m", True) is None
        await rig.chunks()
        rig.attempts.done.clear()
    learned = rig.router._hedge_budget.delay_seconds(hedge, "m", True)
    assert learned is not None and learned < 1.0


async def test_two_simultaneous_answers_have_one_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    a, b = Script(gate, TEXT, DONE), Script(gate, TEXT, DONE)
    rig = Rig(two_deployments(hedge={"after": "5ms", "budget": 1.0}), a=a, b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    gate.set()
    assert await asking == [TEXT, DONE]
    assert sorted(outcome for _, outcome in rig.outcomes) == ["hedge_lost", "ok"]
    assert rig.outcomes[-1][1] == "ok"
    assert (a.closed, b.closed) == (1, 1)
    assert rig.idle()


async def test_a_call_adds_to_the_hedge_budget_once() -> None:
    rig = Rig(
        two_deployments(hedge={"after": "60s", "budget": 0.1}), a=Script(opener=status(500)), b=Script(TEXT, DONE)
    )
    rig.router._hedge_budget._budget = 0.0
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.router._hedge_budget._budget == pytest.approx(0.1)
