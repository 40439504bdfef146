"""A request that servers die of is refused, and one that was only there is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gateway.core.errors import QuarantinedRequest, UpstreamCut
from gateway.deployments.circuit_breaker import CircuitBreaker
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.types import Call
from tests.gateway.routing.rig import DONE, TEXT, Rig, Script, Turns, failing, one_server, server, two_servers

DIES = ProviderFailure(Fault.CUT, "died")


class Mortal(Script):
    """Dies of what it is asked: the connection is cut, and nobody answers health checks afterwards."""

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


async def test_a_request_that_a_server_dies_of_is_not_sent_to_another() -> None:
    a, b = Mortal(), Mortal()
    rig = Rig(two_servers(), a=a, b=b)
    for _ in range(2):
        error = await failing(rig)
        assert isinstance(error, QuarantinedRequest) and error.status == 422
    assert (a.opened, b.opened) == (1, 0)


async def test_of_several_that_were_there_each_is_asked_once_more() -> None:
    gate = asyncio.Event()
    a = Mortal(gate)
    rig = Rig(two_servers(), a=a, b=Script(TEXT, DONE))
    server(rig, "b").breaker.rest(asyncio.get_running_loop().time(), 0.1)
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), user=name)) for name in ("one", "two")]
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if a.opened == 2:
            break
    gate.set()
    assert await asyncio.gather(*asking) == [[TEXT, DONE]] * 2


class MortalLater(Script):
    """Dies in the middle of an answer, and so do all the others that it gives."""

    dead = False

    async def healthy(self) -> bool:
        return not self.dead

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        return DyingReply(self, await super().open(call, headers=headers))


class DyingReply(UpstreamResponse):
    def __init__(self, server: MortalLater, reply: UpstreamResponse) -> None:
        self._server = server
        self._reply = reply

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._reply)
        except ProviderFailure:
            self._server.dead = True
            raise

    async def aclose(self) -> None:
        await self._reply.aclose()


async def test_a_request_that_a_server_dies_of_in_the_middle_of_its_answer_is_not_sent_to_one_again() -> None:
    a, b = MortalLater(TEXT, DIES), MortalLater(TEXT, DIES)
    rig = Rig(two_servers(), a=a, b=b)
    assert isinstance(await failing(rig), UpstreamCut)
    a.dead = False  # it has been started again
    assert isinstance(await failing(rig), QuarantinedRequest)
    assert (a.opened, b.opened) == (1, 0)


async def test_of_several_answers_that_a_death_breaks_off_each_may_be_asked_for_once_more() -> None:
    gate = asyncio.Event()
    rig = Rig(one_server(), a=(a := MortalLater(TEXT, gate, DIES)))
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), user=name)) for name in ("one", "two")]
    while a.opened < 2:
        await asyncio.sleep(0.001)
    gate.set()
    cut = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in cut] == [UpstreamCut, UpstreamCut]
    a.dead, a.steps = False, (TEXT, DONE)
    server(rig, "a").breaker = CircuitBreaker()
    assert await rig.chunks(user="one") == [TEXT, DONE]


async def test_who_was_answered_in_between_two_deaths_has_nothing_against_it() -> None:
    gate = asyncio.Event()
    rig = Rig(one_server(), a=(a := MortalLater(TEXT, gate, DIES)))
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
        server(rig, "a").breaker = CircuitBreaker()
        assert await rig.chunks(user="one") == [TEXT, DONE]
    with pytest.raises(QuarantinedRequest):
        await rig.chunks(user="two")


async def test_an_answer_does_not_go_on_at_the_server_that_has_died_of_it() -> None:
    rig = Rig(one_server(continue_cut_streams=True), a=(a := MortalLater(TEXT, DIES)))
    a.continues_final_message = True
    assert isinstance(await failing(rig), UpstreamCut)
    assert a.opened == 1


async def test_a_cut_connection_to_a_living_server_says_nothing_about_the_request() -> None:
    cut = ProviderFailure(Fault.CUT, "reset")
    rig = Rig(two_servers(), a=Turns(Script(opener=cut), Script(TEXT, DONE)), b=Script(opener=cut))
    assert (await rig.chunks())[-1] == DONE
