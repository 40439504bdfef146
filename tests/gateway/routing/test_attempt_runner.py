"""One attempt: what counts as a useful chunk, and which failures count against the deployment."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import UpstreamTimeout
from gateway.deployments.state import DeploymentState
from gateway.providers.base import Fault, ProviderFailure
from gateway.types import Call
from tests.gateway.calls import a_call, chat
from tests.gateway.routing.rig import (
    DONE,
    ROLE,
    TEXT,
    Rig,
    Script,
    deployment_named,
    failing,
    one_deployment,
    two_deployments,
)


async def test_a_role_alone_is_not_a_useful_chunk() -> None:
    rig = Rig(two_deployments(), a=Script(ROLE, ProviderFailure(Fault.CUT, "died")), b=Script(ROLE, TEXT, DONE))
    assert await rig.chunks() == [ROLE + TEXT, DONE]
    assert rig.outcomes == [("a", "cut"), ("b", "ok")]


async def test_an_empty_answer_is_complete() -> None:
    rig = Rig(two_deployments(), a=Script(ROLE, DONE), b=Script())
    assert await rig.chunks() == [ROLE + DONE]


async def test_a_stream_that_begins_too_slowly_is_replaced() -> None:
    floor = {"chunks": 3, "within": "30ms"}
    rig = Rig(two_deployments(floor=floor), a=Script(TEXT, asyncio.Event()), b=Script(TEXT, TEXT, TEXT, DONE))
    assert await rig.chunks() == [TEXT, TEXT, TEXT, DONE]
    assert rig.outcomes == [("a", "too_slow"), ("b", "ok")]
    assert not deployment_named(rig, "a").breaker.open
    assert rig.idle()


async def test_the_floor_applies_to_one_attempt_only() -> None:
    slow = asyncio.Event()
    rig = Rig(
        two_deployments(floor={"chunks": 3, "within": "30ms"}),
        a=Script(TEXT, asyncio.Event()), b=Script(TEXT, slow, TEXT, TEXT, DONE),
    )  # fmt: skip
    asyncio.get_running_loop().call_later(0.2, slow.set)
    assert await rig.chunks() == [TEXT, TEXT, TEXT, DONE]
    assert rig.outcomes == [("a", "too_slow"), ("b", "ok")]


async def test_a_floor_counts_events_and_not_reads() -> None:
    gate = asyncio.Event()
    rig = Rig(
        two_deployments(floor={"chunks": 3, "within": "30ms"}), a=Script(TEXT * 3, gate, DONE), b=Script(TEXT, DONE)
    )
    asyncio.get_running_loop().call_later(0.1, gate.set)
    assert await rig.chunks() == [TEXT * 3, DONE]
    assert rig.outcomes == [("a", "ok")]


async def test_the_floor_is_ignored_without_another_deployment() -> None:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, gate.set)
    rig = Rig(one_deployment(floor={"chunks": 3, "within": "1ms"}), a=Script(TEXT, gate, TEXT, DONE))
    assert await rig.chunks() == [TEXT, TEXT, DONE]


async def test_a_short_client_timeout_does_not_count_against_the_deployment() -> None:
    policy = two_deployments(ttft="60s")
    rig = Rig(policy, a=Script(asyncio.Event()), b=Script(asyncio.Event()))
    now = asyncio.get_running_loop().time()
    call = a_call(chat(stream=True), policy, headers={b"x-stainless-read-timeout": b"0.4"}, now=now)
    with pytest.raises(UpstreamTimeout), await rig.queue.acquire_slot(call) as permit:
        async with rig.router.open(call, permit, rig.attempts):
            pass
    assert rig.outcomes == [("a", "out_of_time"), ("b", "out_of_time")]
    assert not deployment_named(rig, "a").breaker.is_deprioritised(asyncio.get_running_loop().time())


async def test_the_client_gets_the_last_deployments_error_message() -> None:
    silent = ProviderFailure(Fault.CUT, "reset")
    told = ProviderFailure(
        Fault.CUT, "the server says: out of memory", log_message="it failed", upstream_message="out of memory"
    )
    assert (await failing(Rig(two_deployments(), a=Script(silent), b=Script(told)))).message.endswith(
        "(cut); b reported: out of memory"
    )
    assert (await failing(Rig(two_deployments(), a=Script(told), b=Script(silent)))).message.endswith("(cut)")


async def test_a_deployment_that_was_ejected_during_the_wait_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Script(TEXT)
    rig = Rig(two_deployments(), a=a, b=Script(TEXT, DONE))

    waited: list[str] = []

    async def wait_for_shared_prefill(call: Call, asked: DeploymentState, deadline: float, source: None) -> None:
        waited.append(asked.name)
        if asked.name == "a":
            asked.breaker.eject(asyncio.get_running_loop().time(), 30.0)

    now = asyncio.get_running_loop().time()
    for name in ("a", "b"):  # both have a queued prompt
        deployment_named(rig, name).estimate.begin((), 1, now)
    monkeypatch.setattr("gateway.routing.attempt_runner.wait_for_shared_prefill", wait_for_shared_prefill)
    assert await rig.chunks() == [TEXT, DONE]
    assert (waited, a.opened, rig.outcomes) == (["a", "b"], 0, [("b", "ok")])
