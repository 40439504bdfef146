"""What the router does before it gives up: other servers, and the same ones again; each within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gateway.core.errors import Overloaded, UpstreamBusy, UpstreamError
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.routing.retries import RetryBudget
from gateway.types import Call
from tests.gateway.calls import a_policy
from tests.gateway.routing.rig import (
    DONE,
    TEXT,
    Rig,
    Script,
    Turns,
    busy,
    failing,
    one_server,
    server,
    status,
    two_servers,
)


@pytest.mark.parametrize("first", [status(500), busy(429, 0.01), ProviderFailure(Fault.CONNECT, "reset")])
async def test_the_only_server_is_asked_again_after_a_pause(first: ProviderFailure) -> None:
    rig = Rig(one_server(), a=Turns(Script(opener=first), Script(TEXT)))
    assert await rig.chunks() == [TEXT]
    assert [outcome for _, outcome in rig.outcomes][1:] == ["ok"]
    assert rig.idle()


async def test_a_server_that_names_a_pause_gets_it() -> None:
    rig = Rig(one_server(), a=Turns(Script(opener=busy(429, 0.2)), Script(TEXT)))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.chunks()
    assert loop.time() - began >= 0.2
    assert not server(rig, "a").breaker.open  # that it was busy is no fault


async def test_a_longer_pause_is_the_callers_to_make() -> None:
    rig = Rig(one_server(), a=Script(opener=busy(429, 60.0)))
    error = await failing(rig)
    assert isinstance(error, UpstreamBusy) and error.status == 503
    assert 50 <= int(error.headers["retry-after"]) <= 60
    rig.attempts.done.clear()
    again = await failing(rig)  # nobody is asked meanwhile
    assert isinstance(again, Overloaded) and 50 <= int(again.headers["retry-after"]) <= 60
    assert rig.outcomes == []


async def test_servers_that_fail_on_and_on_are_left_alone_and_the_caller_is_told() -> None:
    script = Script(opener=ProviderFailure(Fault.CONNECT, "refused"))
    rig = Rig(one_server(ttft="2s"), a=script)
    for _ in range(2):
        rig.attempts.done.clear()
        await failing(rig)
    assert server(rig, "a").breaker.open
    opened = script.opened
    server(rig, "a").breaker.eject(asyncio.get_running_loop().time(), 30.0)
    rig.attempts.done.clear()
    error = await failing(rig)
    assert isinstance(error, Overloaded) and int(error.headers["retry-after"]) >= 25
    assert script.opened == opened


async def test_a_spent_retry_budget_ends_the_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(two_servers(retries=0), a=Script(opener=status(500)), b=Script(TEXT))
    monkeypatch.setattr("gateway.routing.retries.BUDGET_REFILL_PER_SECOND", 0.0)
    budget = rig.router._budgets["realtime"] = RetryBudget()
    while budget.take(0.0):
        pass
    error = await failing(rig)
    assert isinstance(error, UpstreamError) and rig.outcomes == [("a", "status_500")]
    assert rig.router.retries_refused > 0


async def test_a_call_whose_server_fails_comes_before_those_that_wait_for_their_turn() -> None:
    """Both servers are full, and more calls wait: whose server fails has the next place that comes free."""
    policy = a_policy(
        deployments=[
            {"name": name, "base_url": f"http://{name}.invalid/v1", "model": "m", "max_concurrency": 1} for name in "ab"
        ],
        models=[{"name": "m", "deployments": ["a", "b"]}],
    )
    fails = asyncio.Event()
    a = Turns(Failing(fails), Script(TEXT, DONE))
    b = Turns(Script(TEXT, last := asyncio.Event(), DONE), Script(TEXT, DONE))
    rig = Rig(policy, a=a, b=b)
    server(rig, "a").breaker.deprioritise(asyncio.get_running_loop().time(), 3600.0)  # b is the first to be asked
    order: list[str] = []

    async def ask(name: str) -> None:
        await rig.chunks(rig.new_attempts())
        order.append(name)

    on_b = asyncio.create_task(ask("on b"))
    while not b.opened:
        await asyncio.sleep(0)
    on_a = asyncio.create_task(ask("on a"))
    while not a.opened:
        await asyncio.sleep(0)
    waiting = asyncio.create_task(ask("waiting"))
    while not rig.queue.depth("realtime"):
        await asyncio.sleep(0)
    server(rig, "a").breaker.eject(asyncio.get_running_loop().time(), 3600.0)  # as one that has failed often
    fails.set()
    while not rig.fleet._pending_moves:
        await asyncio.sleep(0.001)
    last.set()
    await asyncio.gather(on_b, on_a, waiting)
    assert order == ["on b", "on a", "waiting"] and rig.idle()
    assert (a.opened, b.opened) == (1, 3)


class Failing(Script):
    """Breaks off when it is told to."""

    def __init__(self, when: asyncio.Event) -> None:
        super().__init__()
        self.when = when

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        await self.when.wait()
        raise ProviderFailure(Fault.CONNECT, "gone")
