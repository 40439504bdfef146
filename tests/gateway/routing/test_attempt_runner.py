"""When an answer counts as begun, and whose fault it is where it does not begin."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import UpstreamTimeout
from gateway.deployments.fleet import DeploymentState
from gateway.providers.base import Fault, ProviderFailure
from gateway.types import Call
from tests.gateway.calls import a_call, chat
from tests.gateway.routing.rig import DONE, ROLE, TEXT, Rig, Script, failing, one_server, server, two_servers


async def test_a_role_alone_commits_to_nothing() -> None:
    rig = Rig(two_servers(), a=Script(ROLE, ProviderFailure(Fault.CUT, "died")), b=Script(ROLE, TEXT, DONE))
    assert await rig.chunks() == [ROLE + TEXT, DONE]
    assert rig.outcomes == [("a", "cut"), ("b", "ok")]


async def test_an_empty_answer_is_an_answer() -> None:
    rig = Rig(two_servers(), a=Script(ROLE, DONE), b=Script())
    assert await rig.chunks() == [ROLE + DONE]


async def test_a_stream_that_begins_too_slowly_is_replaced() -> None:
    floor = {"chunks": 3, "within": "30ms"}
    rig = Rig(two_servers(floor=floor), a=Script(TEXT, asyncio.Event()), b=Script(TEXT, TEXT, TEXT, DONE))
    assert await rig.chunks() == [TEXT, TEXT, TEXT, DONE]
    assert rig.outcomes == [("a", "too_slow"), ("b", "ok")]
    assert not server(rig, "a").breaker.open
    assert rig.idle()


async def test_where_all_are_slow_the_second_ones_slowness_is_borne() -> None:
    slow = asyncio.Event()
    rig = Rig(
        two_servers(floor={"chunks": 3, "within": "30ms"}),
        a=Script(TEXT, asyncio.Event()), b=Script(TEXT, slow, TEXT, TEXT, DONE),
    )  # fmt: skip
    asyncio.get_running_loop().call_later(0.2, slow.set)
    assert await rig.chunks() == [TEXT, TEXT, TEXT, DONE]
    assert rig.outcomes == [("a", "too_slow"), ("b", "ok")]


async def test_a_floor_counts_what_was_said_and_not_how_often_it_was_read() -> None:
    gate = asyncio.Event()
    rig = Rig(two_servers(floor={"chunks": 3, "within": "30ms"}), a=Script(TEXT * 3, gate, DONE), b=Script(TEXT, DONE))
    asyncio.get_running_loop().call_later(0.1, gate.set)
    assert await rig.chunks() == [TEXT * 3, DONE]
    assert rig.outcomes == [("a", "ok")]


async def test_where_nobody_would_be_faster_slowness_is_borne() -> None:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, gate.set)
    rig = Rig(one_server(floor={"chunks": 3, "within": "1ms"}), a=Script(TEXT, gate, TEXT, DONE))
    assert await rig.chunks() == [TEXT, TEXT, DONE]


async def test_a_client_in_a_hurry_is_answered_in_its_time_and_blames_nobody() -> None:
    policy = two_servers(ttft="60s")
    rig = Rig(policy, a=Script(asyncio.Event()), b=Script(asyncio.Event()))
    now = asyncio.get_running_loop().time()
    call = a_call(chat(stream=True), policy, headers={b"x-stainless-read-timeout": b"0.05"}, now=now)
    with pytest.raises(UpstreamTimeout), await rig.queue.acquire_slot(call) as place:
        async with rig.router.open(call, place, rig.attempts):
            pass
    assert rig.outcomes == [("a", "out_of_time")]
    assert not server(rig, "a").breaker.is_deprioritised(asyncio.get_running_loop().time())


async def test_where_nobody_answers_the_client_hears_what_the_last_server_said() -> None:
    silent = ProviderFailure(Fault.CUT, "reset")
    told = ProviderFailure(
        Fault.CUT, "the server says: out of memory", log_message="it failed", upstream_message="out of memory"
    )
    assert (await failing(Rig(two_servers(), a=Script(silent), b=Script(told)))).message.endswith(
        "(cut); b reported: out of memory"
    )
    assert (await failing(Rig(two_servers(), a=Script(told), b=Script(silent)))).message.endswith("(cut)")


async def test_a_server_that_failed_others_meanwhile_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Script(TEXT)
    rig = Rig(two_servers(), a=a, b=Script(TEXT, DONE))

    async def wait_for_shared_prefill(call: Call, asked: DeploymentState, deadline: float) -> None:
        if asked.name == "a":
            asked.breaker.eject(asyncio.get_running_loop().time(), 30.0)

    monkeypatch.setattr("gateway.routing.attempt_runner.wait_for_shared_prefill", wait_for_shared_prefill)
    assert await rig.chunks() == [TEXT, DONE]
    assert (a.opened, rig.outcomes) == (0, [("b", "ok")])
