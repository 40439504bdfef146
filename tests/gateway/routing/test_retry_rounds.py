"""Retries on other deployments and on the same ones, and their bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gateway.core.errors import Overloaded, UpstreamBusy, UpstreamError
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.types import Call
from tests.gateway.calls import a_policy
from tests.gateway.routing.rig import (
    DONE,
    TEXT,
    Rig,
    Script,
    ScriptSequence,
    busy,
    deployment_named,
    failing,
    one_deployment,
    status,
    two_deployments,
)


@pytest.mark.parametrize("first", [status(500), busy(429, 0.01), ProviderFailure(Fault.CONNECT, "reset")])
async def test_the_only_deployment_is_retried_after_a_pause(first: ProviderFailure) -> None:
    rig = Rig(one_deployment(), a=ScriptSequence(Script(opener=first), Script(TEXT)))
    assert await rig.chunks() == [TEXT]
    assert [outcome for _, outcome in rig.outcomes][1:] == ["ok"]
    assert rig.idle()


async def test_retry_after_is_respected() -> None:
    rig = Rig(one_deployment(), a=ScriptSequence(Script(opener=busy(429, 0.2)), Script(TEXT)))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.chunks()
    assert loop.time() - began >= 0.2
    assert not deployment_named(rig, "a").breaker.open  # a 429 is not a failure


async def test_a_long_retry_after_is_passed_to_the_caller() -> None:
    rig = Rig(one_deployment(), a=Script(opener=busy(429, 60.0)))
    error = await failing(rig)
    assert isinstance(error, UpstreamBusy) and error.status == 503
    assert 50 <= int(error.headers["retry-after"]) <= 60
    rig.attempts.done.clear()
    again = await failing(rig)  # no request is sent during the pause
    assert isinstance(again, Overloaded) and 50 <= int(again.headers["retry-after"]) <= 60
    assert rig.outcomes == []


async def test_deployments_that_keep_failing_get_no_requests() -> None:
    script = Script(opener=ProviderFailure(Fault.CONNECT, "refused"))
    rig = Rig(one_deployment(ttft="2s"), a=script)
    for _ in range(2):
        rig.attempts.done.clear()
        await failing(rig)
    assert deployment_named(rig, "a").breaker.open
    opened = script.opened
    deployment_named(rig, "a").breaker.eject(asyncio.get_running_loop().time(), 30.0)
    rig.attempts.done.clear()
    error = await failing(rig)
    assert isinstance(error, Overloaded) and int(error.headers["retry-after"]) >= 25
    assert script.opened == opened


async def test_a_spent_retry_budget_ends_the_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(two_deployments(retries=0), a=Script(opener=status(500)), b=Script(TEXT))
    monkeypatch.setattr("gateway.routing.retries.BUDGET_REFILL_PER_SECOND", 0.0)
    budget = rig.router._retry_budgets.of("t", "realtime")
    while budget.take(0.0):
        pass
    error = await failing(rig)
    assert isinstance(error, UpstreamError) and rig.outcomes == [("a", "status_500")]
    assert rig.router.retries_refused > 0


async def test_a_retried_call_gets_a_slot_before_queued_calls() -> None:
    """Both deployments are full, and a call is queued. A call whose deployment fails gets the next free slot."""
    policy = a_policy(
        deployments=[
            {"name": name, "base_url": f"http://{name}.invalid/v1", "model": "m", "max_concurrency": 1} for name in "ab"
        ],
        models=[{"name": "m", "deployments": ["a", "b"]}],
    )
    fails = asyncio.Event()
    a = ScriptSequence(FailingOnSignal(fails), Script(TEXT, DONE))
    b = ScriptSequence(Script(TEXT, last := asyncio.Event(), DONE), Script(TEXT, DONE))
    rig = Rig(policy, a=a, b=b)
    deployment_named(rig, "a").breaker.deprioritise(asyncio.get_running_loop().time(), 3600.0)  # b is tried first
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
    deployment_named(rig, "a").breaker.eject(asyncio.get_running_loop().time(), 3600.0)  # as after many failures
    fails.set()
    while not rig.fleet._pending_moves:
        await asyncio.sleep(0.001)
    last.set()
    await asyncio.gather(on_b, on_a, waiting)
    assert order == ["on b", "on a", "waiting"] and rig.idle()
    assert (a.opened, b.opened) == (1, 3)


class FailingOnSignal(Script):
    """Fails when an event is set."""

    def __init__(self, when: asyncio.Event) -> None:
        super().__init__()
        self.when = when

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        await self.when.wait()
        raise ProviderFailure(Fault.CONNECT, "gone")
