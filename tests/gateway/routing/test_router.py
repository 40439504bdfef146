"""The order of attempts, and failures that end a call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import pytest

from gateway.core.errors import UpstreamCut, UpstreamError, UpstreamRefused, UpstreamTimeout
from gateway.deployments.circuit_breaker import FAILURES_TO_OPEN
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.routing.router import MAX_ATTEMPTS
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.routing.rig import (
    Rig,
    Script,
    ScriptedResponse,
    ScriptSequence,
    Step,
    deployment_named,
    one_deployment,
    status,
)


async def test_the_first_deployment_with_a_chunk_answers() -> None:
    a, b = Script(b"1", b"2"), Script(b"x")
    rig = Rig(a=a, b=b)
    assert await rig.chunks() == [b"1", b"2"]
    assert (b.opened, a.closed) == (0, 1)
    assert rig.outcomes == [("a", "ok")]
    assert a.headers == {"traceparent": "span-1"}
    assert rig.idle()


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (ProviderFailure(Fault.CONNECT, "refused"), "connect_error"),
        (status(503), "status_503"),
        (status(429), "status_429"),
        (ProviderFailure(Fault.MALFORMED, "html"), "malformed"),
    ],
)
async def test_a_failure_before_the_first_chunk_is_retried(failure: ProviderFailure, outcome: str) -> None:
    a, b = Script(opener=failure), Script(b"x")
    rig = Rig(a=a, b=b)
    assert await rig.chunks() == [b"x"]
    assert rig.outcomes == [("a", outcome), ("b", "ok")]
    assert rig.idle()


@pytest.mark.parametrize("steps", [(), (ProviderFailure(Fault.CUT, "reset"),)])
async def test_a_response_without_a_chunk_is_retried(steps: tuple[Step, ...]) -> None:
    a, b = Script(*steps), Script(b"x")
    rig = Rig(a=a, b=b)
    assert await rig.chunks() == [b"x"]
    assert rig.outcomes == [("a", "cut"), ("b", "ok")]
    assert a.closed == 1


async def test_a_deployment_whose_dialect_cannot_express_the_call_is_skipped() -> None:
    a, b = Script(b"x"), Script(b"1")
    a.refusal = status(400, Fault.REFUSED)
    rig = Rig(a=a, b=b)
    assert await rig.chunks() == [b"1"]
    assert rig.outcomes == [("b", "ok")]
    assert rig.idle()


async def test_a_call_that_no_dialect_can_express_is_refused_at_once() -> None:
    a, b = Script(b"x"), Script(b"x")
    a.refusal = b.refusal = status(400, Fault.REFUSED)
    rig = Rig(a=a, b=b)
    with pytest.raises(UpstreamRefused) as refusal:
        await rig.chunks()
    assert (refusal.value.upstream_status, refusal.value.content) == (400, b'{"error": {}}')
    assert (a.opened, b.opened, rig.outcomes) == (0, 0, [])
    assert rig.idle()


async def test_a_refused_request_is_not_retried() -> None:
    a, b = Script(opener=status(400, Fault.REFUSED)), Script(b"x")
    rig = Rig(a=a, b=b)
    with pytest.raises(UpstreamRefused) as refusal:
        await rig.chunks()
    assert (refusal.value.upstream_status, refusal.value.content) == (400, b'{"error": {}}')
    assert b.opened == 0
    assert rig.idle()
    assert not next(iter(rig.fleet)).is_deprioritised(asyncio.get_running_loop().time())  # not its fault


async def test_no_deployment_answers() -> None:
    rig = Rig(a=Script(opener=status(500)), b=Script(opener=ProviderFailure(Fault.CONNECT, "refused")))
    with pytest.raises(UpstreamError, match=r"a \(status_500\), b \(connect_error\)") as failure:
        await rig.chunks()
    assert failure.value.status == 502
    assert len(failure.value.body()["attempts"]) == MAX_ATTEMPTS  # each was retried after a pause
    assert failure.value.body()["attempts"][:2] == [
        {"deployment": "a", "outcome": "status_500", "status": 500},
        {"deployment": "b", "outcome": "connect_error", "status": None},
    ]
    assert rig.idle()


async def test_no_first_chunk_in_time() -> None:
    rig = Rig(one_deployment(ttft="20ms"), a=Script(asyncio.Event()))
    with pytest.raises(UpstreamTimeout) as failure:
        await rig.chunks()
    assert failure.value.status == 504
    assert rig.outcomes == [("a", "timeout")]
    assert rig.idle()


async def test_a_silent_deployment_leaves_the_next_one_its_share_of_the_time() -> None:
    # By cost, a deployment that was busy would not be tried again.
    policy = a_policy(classes={"realtime": {"ttft": "400ms"}}, routing={"strategy": "least_busy"})
    rig = Rig(policy, a=Script(asyncio.Event()), b=Script(b"x"))
    for _ in range(FAILURES_TO_OPEN):
        deployment_named(rig, "a").breaker.deprioritised_until = 0.0  # so that it is tried first
        attempts = rig.new_attempts()
        assert await rig.chunks(attempts) == [b"x"]
        assert [attempt.outcome for attempt in attempts.done] == ["silent", "ok"]
    assert deployment_named(rig, "a").breaker.open, "others answer what it does not"


async def test_a_slow_fleet_is_not_convicted_for_its_shares_of_the_time() -> None:
    policy = a_policy(classes={"realtime": {"ttft": "100ms"}})
    rig = Rig(policy, a=Script(asyncio.Event()), b=Script(asyncio.Event()))
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(UpstreamTimeout):
            await rig.chunks(rig.new_attempts())
    assert not any(deployment.breaker.open for deployment in rig.fleet)


@pytest.mark.parametrize("reason", ["context", "refused_content"])
async def test_a_request_that_a_model_rejects_for_a_reason_goes_to_that_reasons_fallbacks(reason: str) -> None:
    rejection = ProviderFailure(Fault.REFUSED, "status 400", status=400, body=b'{"error": {}}', reason=reason)
    deployments = [{"name": name, "base_url": f"http://{name}.invalid/v1", "model": name} for name in "abcd"]
    models = [
        {"name": "m", "deployments": ["a", "b"], "fallbacks": ["last"], "fallbacks_when": {reason: ["short", "long"]}},
        *({"name": name, "deployments": [at]} for name, at in (("short", "c"), ("long", "d"), ("last", "b"))),
    ]
    scripts = {"a": Script(opener=rejection), "b": Script(), "c": Script(opener=rejection), "d": Script(b"x")}
    rig = Rig(a_policy(deployments=deployments, models=models), **scripts)
    assert await rig.chunks() == [b"x"]
    assert rig.outcomes == [("a", "refused"), ("c", "refused"), ("d", "ok")] and not scripts["b"].opened
    scripts["d"].opener = status(503)
    with pytest.raises(UpstreamRefused) as refusal:
        await rig.chunks(rig.new_attempts())
    assert refusal.value.upstream_status == 400
    scripts["a"].opener = status(400, Fault.REFUSED)  # for another reason
    opened = scripts["c"].opened
    with pytest.raises(UpstreamRefused):
        await rig.chunks(rig.new_attempts())
    assert scripts["c"].opened == opened
    assert rig.idle()


async def test_a_stream_that_stalls_is_cut() -> None:
    policy = a_policy(classes={"realtime": {"inter_token": "20ms"}})
    a = Script(b"1", asyncio.Event())
    rig = Rig(policy, a=a, b=Script())
    with pytest.raises(UpstreamCut, match=r"a sent nothing for 0\.02 s"):
        await rig.chunks()
    assert a.closed == 1
    assert rig.idle()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_slow_reader_is_not_a_stalled_stream() -> None:
    """Only waiting for the deployment is bounded. The time that the client takes does not count."""
    policy = a_policy(classes={"realtime": {"inter_token": "20ms"}})
    rig = Rig(policy, a=Script(b"1", b"2", b"3"), b=Script())
    call = a_call(chat(stream=True), policy, now=asyncio.get_running_loop().time())
    with await rig.queue.acquire_slot(call) as permit:
        async with rig.router.open(call, permit, rig.attempts) as upstream:
            read = [await upstream.first()]

            def read_one(chunk: bytes) -> bool:
                read.append(chunk)
                return False

            while not await upstream.stream_to(read_one):
                await asyncio.sleep(0.05)
    assert read == [b"1", b"2", b"3"]


async def test_a_failure_after_the_first_chunk_is_reported_and_not_retried() -> None:
    b = Script(b"x")
    rig = Rig(a=Script(b"1", ProviderFailure(Fault.CUT, "reset")), b=b)
    with pytest.raises(UpstreamCut, match="a: reset"):
        await rig.chunks()
    assert b.opened == 0


async def test_a_deployment_that_breaks_every_stream_is_ejected() -> None:
    rig = Rig(one_deployment(), a=Script(b"1", ProviderFailure(Fault.CUT, "reset")))
    for _ in range(FAILURES_TO_OPEN):
        assert not deployment_named(rig, "a").breaker.open
        with pytest.raises(UpstreamCut):
            await rig.chunks(rig.new_attempts())
    assert deployment_named(rig, "a").breaker.open and rig.idle()


async def test_a_stall_within_the_limit_of_its_class_does_not_count_against_the_deployment() -> None:
    rig = Rig(one_deployment(inter_token="1h"), a=Script(b"1", asyncio.Event()))
    call = a_call(
        chat(stream=True),
        rig.policy,
        now=asyncio.get_running_loop().time(),
        headers={b"x-stainless-read-timeout": b"0.02"},
    )
    with await rig.queue.acquire_slot(call) as permit:
        async with rig.router.open(call, permit, rig.attempts) as upstream:
            with pytest.raises(UpstreamCut, match=r"a sent nothing for 0\.02 s"):
                await upstream.stream_to(lambda chunk: True)
    assert not deployment_named(rig, "a").breaker.is_deprioritised(asyncio.get_running_loop().time())


async def test_a_stream_that_is_too_long_is_not_reported_as_stalled() -> None:
    class Endless(ScriptedResponse):
        async def __anext__(self) -> bytes:
            await asyncio.sleep(0.001)
            return b"more"

    class Talker(Script):
        async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
            return Endless(self)

    rig = Rig(one_deployment(total="50ms"), a=Talker())
    with pytest.raises(UpstreamCut, match="a was still streaming when the request's time limit was reached"):
        await rig.chunks()
    assert not deployment_named(rig, "a").breaker.is_deprioritised(asyncio.get_running_loop().time())


async def test_a_failure_is_logged_once_and_without_the_upstream_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "warmpath")
    reset = ProviderFailure(Fault.MALFORMED, "content-type 'text/html'", status=200)
    rig = Rig(one_deployment(), a=ScriptSequence(*[Script(opener=reset)] * FAILURES_TO_OPEN, Script(b"x")))
    with pytest.raises(UpstreamError):
        await rig.chunks()
    await rig.chunks(rig.new_attempts())
    assert [record.message for record in caplog.records][:2] == [
        "a failed (malformed): content-type 'text/html'",
        "a: circuit breaker open; a probe request will close it",
    ]
    assert caplog.records[-1].message.startswith("a: circuit breaker closed after")
    assert len(caplog.records) == 3


async def test_a_cancelled_call_closes_its_connection_and_is_recorded() -> None:
    a = Script(asyncio.Event())
    rig = Rig(a=a, b=Script(b"x"))
    waiting = asyncio.create_task(rig.chunks())
    for _ in range(10):
        await asyncio.sleep(0)
    assert a.opened
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert a.closed == 1
    assert rig.outcomes == [("a", "client_gone")]
    assert rig.idle()


async def test_fallback_models_are_tried_last() -> None:
    policy = a_policy(
        models=[{"name": "m", "deployments": ["a"], "fallbacks": ["n"]}, {"name": "n", "deployments": ["b", "a"]}]
    )
    a, b = Script(opener=status(500)), Script(b"x")
    rig = Rig(policy, a=a, b=b)
    assert await rig.chunks() == [b"x"]
    assert rig.outcomes == [("a", "status_500"), ("b", "ok")]
    assert a.opened == 1
    assert rig.idle()


async def test_a_closed_upstream_has_no_timer() -> None:
    rig = Rig(a=Script(b"1"), b=Script())
    call = a_call(chat(stream=True), rig.policy, now=asyncio.get_running_loop().time())
    with await rig.queue.acquire_slot(call) as permit:
        async with rig.router.open(call, permit, rig.attempts) as upstream:
            await upstream.stream_to(lambda chunk: True)
            assert upstream._wait is not None and upstream._wait._timer is not None
    assert upstream._wait._timer is None


async def test_a_bug_in_a_provider_is_not_blamed_on_the_client() -> None:
    class Broken(Script):
        async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
            raise ZeroDivisionError

    rig = Rig(a=Broken(), b=Script())
    with pytest.raises(ZeroDivisionError):
        await rig.chunks()
    assert rig.outcomes == [("a", "given_up")] and rig.idle()
