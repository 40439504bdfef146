"""A request that crashes deployments is blocked. One that was only in flight at a crash is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gateway.core.errors import QuarantinedRequest, UpstreamCut
from gateway.deployments.circuit_breaker import CircuitBreaker
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.types import Call
from tests.gateway.routing.rig import (
    DONE,
    TEXT,
    Rig,
    Script,
    ScriptSequence,
    deployment_named,
    failing,
    one_deployment,
    two_deployments,
)

DIES = ProviderFailure(Fault.CUT, "died")


class CrashingProvider(Script):
    """Crashes on a request: the connection is cut, and health checks fail afterwards."""

    dead = False

    async def healthy(self) -> bool:
        return not self.dead

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        self.opened += 1
        if self.dead:
            raise ProviderFailure(Fault.CONNECT, "refused")
        if self.steps:
            await self.steps[0].wait()  # type: ignore[union-attr]
        self.dead = True
        raise ProviderFailure(Fault.CUT, "died")


async def test_a_request_that_crashes_a_deployment_is_not_retried() -> None:
    a, b = CrashingProvider(), CrashingProvider()
    rig = Rig(two_deployments(), a=a, b=b)
    for _ in range(2):
        error = await failing(rig)
        assert isinstance(error, QuarantinedRequest) and error.status == 422
    assert (a.opened, b.opened) == (1, 0)


async def test_each_of_several_calls_at_a_crash_is_retried_once() -> None:
    gate = asyncio.Event()
    a = CrashingProvider(gate)
    rig = Rig(two_deployments(), a=a, b=Script(TEXT, DONE))
    deployment_named(rig, "b").breaker.rest(asyncio.get_running_loop().time(), 0.1)
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), user=name)) for name in ("one", "two")]
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if a.opened == 2:
            break
    gate.set()
    assert await asyncio.gather(*asking) == [[TEXT, DONE]] * 2


class CrashingMidStream(Script):
    """Crashes mid-stream, which cuts all streams in flight."""

    dead = False

    async def healthy(self) -> bool:
        return not self.dead

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        return CrashingResponse(self, await super().open(call, headers=headers))


class CrashingResponse(UpstreamResponse):
    def __init__(self, deployment_named: CrashingMidStream, reply: UpstreamResponse) -> None:
        self._server = deployment_named
        self._reply = reply

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._reply)
        except ProviderFailure:
            self._server.dead = True
            raise

    async def aclose(self) -> None:
        await self._reply.aclose()


async def test_a_request_that_crashes_a_deployment_mid_stream_is_blocked() -> None:
    a, b = CrashingMidStream(TEXT, DIES), CrashingMidStream(TEXT, DIES)
    rig = Rig(two_deployments(), a=a, b=b)
    assert isinstance(await failing(rig), UpstreamCut)
    a.dead = False  # it was restarted
    assert isinstance(await failing(rig), QuarantinedRequest)
    assert (a.opened, b.opened) == (1, 0)


async def test_each_of_several_streams_cut_by_a_crash_may_be_retried_once() -> None:
    gate = asyncio.Event()
    rig = Rig(one_deployment(), a=(a := CrashingMidStream(TEXT, gate, DIES)))
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), user=name)) for name in ("one", "two")]
    while a.opened < 2:
        await asyncio.sleep(0.001)
    gate.set()
    cut = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in cut] == [UpstreamCut, UpstreamCut]
    a.dead, a.steps = False, (TEXT, DONE)
    deployment_named(rig, "a").breaker = CircuitBreaker()
    assert await rig.chunks(user="one") == [TEXT, DONE]


async def test_a_request_that_completes_between_two_crashes_loses_its_strikes() -> None:
    gate = asyncio.Event()
    rig = Rig(one_deployment(), a=(a := CrashingMidStream(TEXT, gate, DIES)))
    for _ in range(2):
        gate.clear()
        a.steps = (TEXT, gate, DIES)
        asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), user=name)) for name in ("one", "two")]
        a.opened = 0
        while a.opened < 2:
            await asyncio.sleep(0.001)
        gate.set()
        cut = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(error) for error in cut] == [UpstreamCut, UpstreamCut]
        a.dead, a.steps = False, (TEXT, DONE)
        deployment_named(rig, "a").breaker = CircuitBreaker()
        assert await rig.chunks(user="one") == [TEXT, DONE]
    with pytest.raises(QuarantinedRequest):
        await rig.chunks(user="two")


async def test_a_stream_is_not_resumed_on_the_deployment_that_it_crashed() -> None:
    rig = Rig(one_deployment(continue_cut_streams=True), a=(a := CrashingMidStream(TEXT, DIES)))
    a.continues_final_message = True
    assert isinstance(await failing(rig), UpstreamCut)
    assert a.opened == 1


async def test_a_cut_connection_to_a_healthy_deployment_is_no_strike() -> None:
    cut = ProviderFailure(Fault.CUT, "reset")
    rig = Rig(two_deployments(), a=ScriptSequence(Script(opener=cut), Script(TEXT, DONE)), b=Script(opener=cut))
    assert (await rig.chunks())[-1] == DONE
