"""A late server loses to a second one, and nothing of either is left behind."""

from __future__ import annotations

import asyncio

import pytest

from gateway.routing.hedge_budget import SAMPLES_MIN
from tests.gateway.routing.rig import DONE, TEXT, Rig, Script, server, status, two_servers


async def test_a_late_server_loses_to_a_second_one() -> None:
    a, b = Script(asyncio.Event()), Script(TEXT, DONE)
    rig = Rig(two_servers(hedge={"after": "10ms", "budget": 1.0}), a=a, b=b)
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("a", "hedge_lost"), ("b", "ok")]
    assert (a.closed, b.closed) == (1, 1)
    assert rig.idle()
    assert not server(rig, "a").breaker.is_deprioritised(asyncio.get_running_loop().time())


async def test_the_first_may_still_win() -> None:
    late, b = asyncio.Event(), Script(asyncio.Event())
    rig = Rig(two_servers(hedge={"after": "10ms", "budget": 1.0}), a=Script(late, TEXT, DONE), b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    late.set()
    assert await asking == [TEXT, DONE]
    assert rig.outcomes == [("b", "hedge_lost"), ("a", "ok")]
    assert rig.idle()


async def test_a_hedge_that_fails_leaves_the_first_its_time() -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)
    rig = Rig(
        two_servers(hedge={"after": "10ms", "budget": 1.0}), a=Script(late, TEXT, DONE), b=Script(opener=status(500))
    )
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("b", "status_500"), ("a", "ok")]
    assert rig.idle()


async def test_without_budget_nobody_is_asked_twice() -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)
    rig = Rig(two_servers(hedge={"after": "10ms", "budget": 0.01}), a=Script(late, TEXT, DONE), b=Script(TEXT))
    rig.router._hedging._budget = 0.0
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.outcomes == [("a", "ok")]


async def test_a_client_that_leaves_a_race_ends_both() -> None:
    a, b = Script(asyncio.Event()), Script(asyncio.Event())
    rig = Rig(two_servers(hedge={"after": "5ms", "budget": 1.0}), a=a, b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert sorted(rig.outcomes) == [("a", "client_gone"), ("b", "client_gone")]
    assert rig.idle()


async def test_late_is_learned() -> None:
    rig = Rig(two_servers(hedge={"after": "p95", "budget": 1.0}), a=Script(TEXT, DONE), b=Script(TEXT, DONE))
    hedge = rig.policy.classes["realtime"].hedge
    assert hedge is not None
    for _ in range(SAMPLES_MIN):
        assert rig.router._hedging.delay_seconds(hedge, "m", True) is None
        await rig.chunks()
        rig.attempts.done.clear()
    learned = rig.router._hedging.delay_seconds(hedge, "m", True)
    assert learned is not None and learned < 1.0


async def test_both_answering_in_one_moment_is_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    a, b = Script(gate, TEXT, DONE), Script(gate, TEXT, DONE)
    rig = Rig(two_servers(hedge={"after": "5ms", "budget": 1.0}), a=a, b=b)
    asking = asyncio.create_task(rig.chunks())
    while not b.opened:
        await asyncio.sleep(0.005)
    gate.set()
    assert await asking == [TEXT, DONE]
    assert sorted(outcome for _, outcome in rig.outcomes) == ["hedge_lost", "ok"]
    assert rig.outcomes[-1][1] == "ok"
    assert (a.closed, b.closed) == (1, 1)
    assert rig.idle()


async def test_a_call_brings_its_share_of_a_hedge_once_however_often_it_is_tried() -> None:
    rig = Rig(two_servers(hedge={"after": "60s", "budget": 0.1}), a=Script(opener=status(500)), b=Script(TEXT, DONE))
    rig.router._hedging._budget = 0.0
    assert await rig.chunks() == [TEXT, DONE]
    assert rig.router._hedging._budget == pytest.approx(0.1)
