"""Who pays for a failure: the deployment, the request, or neither (`deployments/evidence.py` has the rules)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.errors import (
    GatewayError,
    Overloaded,
    QuarantinedRequest,
    UpstreamCut,
    UpstreamError,
    UpstreamRefused,
)
from gateway.deployments.circuit_breaker import FAILURES_TO_OPEN, CircuitBreaker
from gateway.policy import Policy
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.types import Call
from tests.gateway.calls import a_policy
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
WORDS = b'{"error": {"message": "the schema is too deep"}}'


def error(status: int = 500) -> ProviderFailure:
    return ProviderFailure(Fault.STATUS, f"status {status}", status=status, body=WORDS)


def setup_failure(status: int) -> ProviderFailure:
    return ProviderFailure(Fault.SETUP, f"status {status}: the deployment rejected the gateway's key", status=status)


def saying(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def three_deployments(**realtime: object) -> Policy:
    return a_policy(
        deployments=[{"name": name, "base_url": f"http://{name}.invalid/v1", "model": "m"} for name in "abc"],
        models=[{"name": "m", "deployments": ["a", "b", "c"]}],
        classes={"realtime": realtime},
    )


class BadRequestsFail(Script):
    """Answers, but has an error for requests that say "bad"."""

    def __init__(self, failure: ProviderFailure | None = None) -> None:
        super().__init__(TEXT, DONE)
        self.failure = failure or error()
        self.failed = 0

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        if b"bad" in bytes(call.fields["messages"]):
            self.opened += 1
            self.failed += 1
            raise self.failure
        return await super().open(call, headers=headers, body=body)


async def refused(rig: Rig, **fields: Any) -> UpstreamRefused:
    with pytest.raises(UpstreamRefused) as refusal:
        await rig.chunks(rig.new_attempts(), **fields)
    assert rig.idle()
    return refusal.value


async def good_traffic(rig: Rig) -> None:
    """Requests that are answered, without end."""
    while True:
        assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]
        await asyncio.sleep(0)


@asynccontextmanager
async def beside_good_traffic(rig: Rig) -> AsyncIterator[None]:
    assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]
    task = asyncio.create_task(good_traffic(rig))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_bad_request_is_tried_once_and_gets_the_servers_words() -> None:
    """Beside requests that succeed; and the deployment stays available for them, whatever the number of bad ones."""
    rig = Rig(one_deployment(), a=(a := BadRequestsFail()))
    async with beside_good_traffic(rig):
        for number in range(3 * FAILURES_TO_OPEN):
            refusal = await refused(rig, **saying(f"bad {number}"))
            assert (refusal.upstream_status, refusal.content, refusal.retryable) == (500, WORDS, False)
    assert not deployment_named(rig, "a").breaker.open and a.failed == 3 * FAILURES_TO_OPEN
    assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]


async def test_a_bad_request_is_tried_at_one_other_deployment() -> None:
    scripts = {name: BadRequestsFail() for name in "abc"}
    rig = Rig(three_deployments(), **scripts)
    for deployment in rig.fleet:
        deployment.evidence.succeeded(asyncio.get_running_loop().time() + 1.0)  # others succeed there meanwhile
    await refused(rig, **saying("bad"))
    assert sorted(script.opened for script in scripts.values()) == [0, 1, 1]


async def test_an_error_without_evidence_is_retried_once_at_the_only_deployment() -> None:
    rig = Rig(one_deployment(), a=ScriptSequence(Script(opener=error()), Script(TEXT, DONE)))
    assert await rig.chunks() == [TEXT, DONE]
    rig = Rig(one_deployment(), a=(a := Script(opener=error())))
    failed = await failing(rig)
    assert isinstance(failed, UpstreamError) and a.opened == 2


async def test_an_error_at_a_deployment_where_another_request_succeeds_meanwhile_is_not_retried_there() -> None:
    a = BadRequestsFail()
    rig = Rig(one_deployment(), a=a)
    bad = asyncio.create_task(refused(rig, **saying("bad")))
    while not a.opened:
        await asyncio.sleep(0)
    assert await rig.chunks() == [TEXT, DONE]  # during the pause before the retry
    await bad
    assert a.opened == 2


async def test_a_deployment_whose_errors_another_one_does_not_have_is_ejected() -> None:
    rig = Rig(two_deployments(), a=(a := Script(opener=error())), b=Script(TEXT, DONE))
    for number in range(FAILURES_TO_OPEN):
        deployment_named(rig, "a").breaker.deprioritised_until = 0.0  # so that it is tried first
        assert await rig.chunks(rig.new_attempts(), **saying(str(number))) == [TEXT, DONE]
    assert deployment_named(rig, "a").breaker.open and a.opened == FAILURES_TO_OPEN


async def test_distinct_requests_that_fail_at_the_only_deployment_open_its_breaker() -> None:
    rig = Rig(one_deployment(), a=Script(opener=error()))
    for number in range(FAILURES_TO_OPEN):
        assert not deployment_named(rig, "a").breaker.open
        with pytest.raises(GatewayError):
            await rig.chunks(rig.new_attempts(), **saying(str(number)))
    assert deployment_named(rig, "a").breaker.open


async def test_one_tenants_bad_requests_do_not_use_up_the_retries_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.routing.retries.BUDGET_REFILL_PER_SECOND", 0.0)
    monkeypatch.setattr("gateway.routing.retries.BUDGET_MAX_RETRIES", 3.0)
    rig = Rig(two_deployments(retries=0), a=BadRequestsFail(), b=BadRequestsFail())
    for number in range(5):
        with pytest.raises(GatewayError):
            await rig.chunks(rig.new_attempts(), **saying(f"bad {number}"))
    assert rig.router.retries_refused
    for deployment in rig.fleet:
        deployment.breaker = CircuitBreaker()
    rig.scripts["a"].failure = error(503)
    assert await rig.chunks(rig.new_attempts(), tenant="u") == [TEXT, DONE]


@pytest.mark.parametrize("status", [401, 402, 403, 404])
async def test_a_wrongly_configured_deployment_is_ejected_at_once(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(two_deployments(), a=(a := Script(opener=setup_failure(status))), b=Script(TEXT, DONE))
    for _ in range(5):
        assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]
    state = deployment_named(rig, "a")
    assert a.opened == 1 and state.breaker.open and str(status) in state.ejections.reason
    assert [record.levelname for record in caplog.records if "ejected for" in record.message] == ["ERROR"]
    state.breaker.end_ejection()
    a.opener, a.steps = None, (TEXT, DONE)  # the server's configuration was corrected
    deployment_named(rig, "b").breaker.eject(asyncio.get_running_loop().time(), 60.0)
    assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]
    assert not state.ejections.reason and not state.breaker.open


async def test_the_client_learns_why_the_only_deployment_is_ejected() -> None:
    rig = Rig(one_deployment(), a=(a := Script(opener=setup_failure(401))))
    failed = await failing(rig)
    assert isinstance(failed, UpstreamError) and "status_401" in failed.message and a.opened == 1
    rig.attempts.done.clear()
    rig.attempts.rejected_at.clear()
    failed = await failing(rig)
    assert isinstance(failed, Overloaded) and "rejected the gateway's key" in failed.message and a.opened == 1


async def test_a_403_for_one_request_does_not_eject_a_deployment_that_answers_others() -> None:
    rig = Rig(one_deployment(), a=BadRequestsFail(setup_failure(403)))
    async with beside_good_traffic(rig):
        refusal = await refused(rig, **saying("bad"))
    assert refusal.upstream_status == 403 and not deployment_named(rig, "a").breaker.open


async def test_a_capability_that_a_deployment_lacks_is_remembered() -> None:
    unsupported = ProviderFailure(Fault.UNSUPPORTED, "status 501", status=501, body=WORDS)
    image = saying([{"type": "image_url", "image_url": {"url": "bad"}}])
    a, b = BadRequestsFail(unsupported), Script(TEXT, DONE)
    rig = Rig(two_deployments(), a=a, b=b)
    for _ in range(5):
        assert await rig.chunks(rig.new_attempts(), **image) == [TEXT, DONE]
    assert (a.opened, b.opened) == (1, 5)
    assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]
    assert (a.opened, b.opened) == (2, 5) and not deployment_named(rig, "a").is_deprioritised(0.0)
    deployment_named(rig, "b").breaker.eject(asyncio.get_running_loop().time(), 60.0)
    refusal = await refused(rig, **image)  # nothing else is left
    assert (refusal.upstream_status, refusal.content, a.opened) == (501, WORDS, 3)


async def test_an_answer_ends_the_memory_of_a_missing_capability() -> None:
    unsupported = ProviderFailure(Fault.UNSUPPORTED, "status 501", status=501, body=WORDS)
    rig = Rig(one_deployment(), a=BadRequestsFail(unsupported))
    await refused(rig, **saying("bad: this quotes 'not supported'"))
    assert deployment_named(rig, "a").missing
    assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]
    assert not deployment_named(rig, "a").missing


class CrashingProvider(Script):
    """Crashes on a request: the connection is cut, and health checks fail afterwards."""

    dead = False

    async def healthy(self) -> bool:
        return not self.dead

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        self.opened += 1
        if self.dead:
            raise ProviderFailure(Fault.CONNECT, "refused")
        if self.steps:
            await self.steps[0].wait()  # type: ignore[union-attr]
        self.dead = True
        raise ProviderFailure(Fault.CUT, "died")


async def test_a_request_is_convicted_at_its_second_crash() -> None:
    crashing = {name: CrashingProvider() for name in "abc"}
    rig = Rig(three_deployments(), **crashing)
    for attempt in range(2):
        error = await failing(rig, tenant="tu"[attempt])  # another tenant gets the same answer
        assert isinstance(error, QuarantinedRequest) and error.status == 422
    assert sorted(each.opened for each in crashing.values()) == [0, 1, 1]
    assert isinstance(await failing(rig, messages=[{"role": "user", "content": "another"}]), UpstreamError)


async def test_a_crash_convicts_nobody_who_is_answered_afterwards() -> None:
    """A redeployment, an out-of-memory kill: the request is answered by the next deployment."""
    rig = Rig(two_deployments(), a=CrashingProvider(), b=Script(TEXT, DONE))
    assert await rig.chunks() == [TEXT, DONE]
    assert not rig.fleet.quarantine


async def test_a_connection_that_is_lost_at_a_shutdown_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    a = CrashingProvider(gate)
    rig = Rig(one_deployment(), a=a)
    asking = asyncio.create_task(failing(rig))
    while not a.opened:
        await asyncio.sleep(0)
    evidence = deployment_named(rig, "a").evidence
    evidence.refused_connection(asyncio.get_running_loop().time())
    monkeypatch.setattr("gateway.deployments.evidence.SHUTDOWN_MARGIN_SECONDS", 0.0)
    gate.set()
    assert isinstance(await asking, UpstreamError)
    assert not rig.fleet.quarantine


async def test_a_call_ends_at_its_second_crash_even_if_others_may_be_the_cause() -> None:
    crashing = {name: CrashingProvider() for name in "abc"}
    rig = Rig(three_deployments(), **crashing)
    for deployment in rig.fleet:  # another request is in flight at each crash
        rig.fleet.quarantine.crashed(1, deployment.shared_id, asyncio.get_running_loop().time())
    assert isinstance(await failing(rig), UpstreamError)
    assert sorted(each.opened for each in crashing.values()) == [0, 1, 1]


async def test_each_of_several_calls_at_a_crash_is_retried_once() -> None:
    gate = asyncio.Event()
    a = CrashingProvider(gate)
    rig = Rig(two_deployments(), a=a, b=Script(TEXT, DONE))
    deployment_named(rig, "b").breaker.rest(asyncio.get_running_loop().time(), 0.1)
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), **saying(name))) for name in ("one", "two")]
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

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        return CrashingResponse(self, await super().open(call, headers=headers, body=body))


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


async def test_a_request_that_crashes_two_deployments_mid_stream_is_blocked() -> None:
    a, b = CrashingMidStream(TEXT, DIES), CrashingMidStream(TEXT, DIES)
    rig = Rig(two_deployments(), a=a, b=b)
    for _ in range(2):
        assert isinstance(await failing(rig), UpstreamCut)
    a.dead = b.dead = False  # they were restarted
    assert isinstance(await failing(rig), QuarantinedRequest)
    assert (a.opened, b.opened) == (1, 1)


async def test_each_of_several_streams_cut_by_a_crash_may_be_retried_once() -> None:
    gate = asyncio.Event()
    rig = Rig(one_deployment(), a=(a := CrashingMidStream(TEXT, gate, DIES)))
    asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), **saying(name))) for name in ("one", "two")]
    while a.opened < 2:
        await asyncio.sleep(0.001)
    gate.set()
    cut = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in cut] == [UpstreamCut, UpstreamCut]
    a.dead, a.steps = False, (TEXT, DONE)
    deployment_named(rig, "a").breaker = CircuitBreaker()
    assert await rig.chunks(**saying("one")) == [TEXT, DONE]


async def test_a_request_that_completes_between_two_crashes_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.deployments.evidence.SAME_CRASH_SECONDS", 0.1)
    gate = asyncio.Event()
    rig = Rig(one_deployment(), a=(a := CrashingMidStream(TEXT, gate, DIES)))
    for _ in range(2):
        gate.clear()
        a.steps = (TEXT, gate, DIES)
        asking = [asyncio.create_task(rig.chunks(rig.new_attempts(), **saying(name))) for name in ("one", "two")]
        a.opened = 0
        while a.opened < 2:
            await asyncio.sleep(0.001)
        gate.set()
        cut = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(error) for error in cut] == [UpstreamCut, UpstreamCut]
        a.dead, a.steps = False, (TEXT, DONE)
        deployment_named(rig, "a").breaker = CircuitBreaker()
        assert await rig.chunks(**saying("one")) == [TEXT, DONE]
        await asyncio.sleep(0.11)
    with pytest.raises(QuarantinedRequest):
        await rig.chunks(**saying("two"))


async def test_a_stream_is_not_resumed_on_the_deployment_that_it_crashed() -> None:
    rig = Rig(one_deployment(continue_cut_streams=True), a=(a := CrashingMidStream(TEXT, DIES)))
    a.continues_final_message = True
    assert isinstance(await failing(rig), UpstreamCut)
    assert a.opened == 1


async def test_a_cut_connection_to_a_healthy_deployment_is_no_strike() -> None:
    cut = ProviderFailure(Fault.CUT, "reset")
    rig = Rig(two_deployments(), a=ScriptSequence(Script(opener=cut), Script(TEXT, DONE)), b=Script(opener=cut))
    assert (await rig.chunks())[-1] == DONE
