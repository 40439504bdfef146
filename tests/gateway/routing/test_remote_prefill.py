"""Prefill and decode deployments: which of them gets what, and what a failing prefill costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.errors import Overloaded, UpstreamRefused
from gateway.core.kv_transfer import PREFILL, load_from
from gateway.deployments.circuit_breaker import FAILURES_TO_OPEN
from gateway.deployments.state import DeploymentState
from gateway.policy import Policy
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.routing import STRATEGIES
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.remote_prefill import LATE_FACTOR, LATE_MIN_SECONDS, _limit_seconds
from gateway.routing.route_log import RouteLog, read_routes
from gateway.routing.router import Router
from gateway.types import Call, Operation, Usage
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.routing.rig import DONE, TEXT, Rig, Script, Step, deployment_named, status

LONG = [{"role": "user", "content": "All the world is a stage, and all the men and women merely players. " * 200}]
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e-1", "remote_block_ids": [[1, 2]], "remote_host": "p"}
ANSWER = json.dumps({
    "choices": [{"message": {"content": "x"}}],
    "usage": {"prompt_tokens": 3400, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}},
    "kv_transfer_params": PARAMS,
}).encode()  # fmt: skip


class Seen(Script):
    """Remembers the calls that it was sent."""

    def __init__(self, *steps: Step, opener: ProviderFailure | asyncio.Event | None = None) -> None:
        super().__init__(*steps, opener=opener)
        self.calls: list[Call] = []

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        self.calls.append(call)
        return await super().open(call, headers=headers, body=body)


class Strict(Seen):
    """Rejects `kv_transfer_params`."""

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        response = await super().open(call, headers=headers, body=body)
        if call.kv_transfer is not None:
            raise status(400, Fault.REFUSED)
        return response


def policy(provider: str = "vllm", *, decode: str = "d", prefill: str = "p", **fields: Any) -> Policy:
    """Prefill deployments are fast, and decode deployments have the default of 2,000 tokens per second."""
    roles = {**dict.fromkeys(prefill, ("prefill", 1_000_000)), **dict.fromkeys(decode, ("decode", 2_000))}
    return a_policy(
        deployments=[
            {"name": name, "base_url": f"http://{name}.invalid/v1", "provider": provider, "model": "served",
             "role": role, "prefill_tokens_per_second": rate}
            for name, (role, rate) in roles.items()
        ],
        models=[{"name": "m", "deployments": list(roles)}],
        **fields,
    )  # fmt: skip


def decoding() -> Seen:
    return Seen(TEXT, DONE)


async def test_a_long_prompt_is_computed_by_a_prefill_deployment_first() -> None:
    p, d = Seen(ANSWER), decoding()
    rig = Rig(policy(), p=p, d=d)
    assert await rig.chunks(messages=LONG) == [TEXT, DONE]
    assert rig.outcomes == [("p", "prefilled"), ("d", "ok")]
    asked, answered = p.calls[0], d.calls[0]
    assert asked.kv_transfer is PREFILL and not asked.stream and asked.max_output_tokens == 1
    assert asked.fields == answered.fields and asked.cache_salt == answered.cache_salt, "the prompt is the same"
    assert answered.stream and answered.kv_transfer is not None
    assert json.loads(bytes(answered.kv_transfer)) == PARAMS, "what the engine said, unchanged"
    prefilled, answer = rig.attempts.done
    assert prefilled.unbilled == Usage(3384, 16, output=1, exact=True)
    assert (answer.blocks_from, answer.unbilled) == ("p", None)
    assert rig.attempts.tries == 1
    assert p.closed == 1 and rig.idle()


async def test_a_short_uncached_part_is_computed_where_the_answer_is() -> None:
    p, d = Seen(ANSWER), decoding()
    rig = Rig(policy(), p=p, d=d)
    await rig.chunks(messages=LONG)
    await rig.chunks(rig.new_attempts(), messages=LONG)  # the decode deployment has it now
    await rig.chunks(rig.new_attempts())
    assert (p.opened, d.opened) == (1, 3)
    assert [call.kv_transfer is None for call in d.calls] == [False, True, True]


async def test_the_threshold_is_the_policy_s() -> None:
    """The policy's guess of the prefill speed is 2,000 tokens per second, and the prompt has 3,400."""
    for above, prefills in (("1.5s", 1), ("2s", 0)):
        p = Seen(ANSWER)
        rig = Rig(policy(routing={"remote_prefill_above": above}), p=p, d=decoding())
        await rig.chunks(messages=LONG)
        assert p.opened == prefills


@pytest.mark.parametrize("field", [{"prompt_logprobs": 1}, {"echo": True}])
async def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_where_the_answer_is(
    field: dict[str, Any],
) -> None:
    p = Seen(ANSWER)
    rig = Rig(policy(), p=p, d=decoding())
    await rig.chunks(messages=LONG, **field)
    assert p.opened == 0


@pytest.mark.parametrize(("provider", "prefills"), [("vllm", 0), ("warmpath", 1)])
async def test_params_of_one_sequence_do_not_serve_several(provider: str, prefills: int) -> None:
    fields: list[tuple[dict[str, Any], int]] = [({"n": 3}, prefills), ({"n": 1}, 1), ({}, 1)]
    for several, expected in fields:
        p = Seen(ANSWER)
        await Rig(policy(provider), p=p, d=decoding()).chunks(messages=LONG, **several)
        assert p.opened == expected
    given, text = policy(provider), LONG[0]["content"]
    for prompt, expected in (([text, text], prefills), (text, 1)):
        rig = Rig(given, p=Seen(ANSWER), d=decoding())
        call = a_call({"model": "m", "prompt": prompt}, given, operation=Operation.COMPLETION)
        (candidate,) = rig.router.order(call, 0.0)
        assert (rig.router.prefill_of(call, candidate, 0.0) is not None) is bool(expected)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (lambda: Seen(opener=ProviderFailure(Fault.CONNECT, "refused")), "connect_error"),
        (lambda: Seen(opener=status(500)), "status_500"),
        (lambda: Seen(opener=status(400, Fault.REFUSED)), "refused"),
        (lambda: Seen(ProviderFailure(Fault.CUT, "reset")), "cut"),
        (lambda: Seen(opener=asyncio.Event()), "timeout"),
    ],
)
async def test_a_prefill_that_fails_costs_time_only(script: Any, outcome: str) -> None:
    p, d = script(), decoding()
    rig = Rig(policy(classes={"realtime": {"ttft": "400ms", "retries": 0.0}}), p=p, d=d)
    assert await rig.chunks(messages=LONG) == [TEXT, DONE]
    assert rig.outcomes == [("p", outcome), ("d", "ok")]
    assert d.calls[0].kv_transfer is None
    assert rig.attempts.done[0].unbilled is None
    assert rig.idle()


async def test_a_prefill_deployment_that_hangs_delays_one_call_and_not_each() -> None:
    p, d = Seen(opener=asyncio.Event()), decoding()
    # The scripted decode deployment computes prompts in no time, which is learned.
    given = policy(classes={"realtime": {"ttft": "100ms"}}, routing={"remote_prefill_above": 1e-9})
    rig = Rig(given, p=p, d=d)
    hung = deployment_named(rig, "p")
    for number in range(FAILURES_TO_OPEN):
        prompts = [f"{number} {again} {LONG[0]['content']}" for again in range(3)]
        for prompt in prompts:
            await rig.chunks(rig.new_attempts(), messages=[{"role": "user", "content": prompt}])
        assert p.opened == number + 1
        hung.breaker.deprioritised_until = 0.0  # its rest is over
    assert d.opened == 3 * p.opened
    assert hung.breaker.open


async def test_a_prefill_is_late_after_a_multiple_of_its_predicted_time() -> None:
    given = policy(classes={"realtime": {"ttft": "100s"}})
    call = a_call(chat(LONG[0]["content"]), given)
    rig = Rig(given, p=Seen(ANSWER), d=decoding())
    (ranked,) = PrefixAffinity().order(call, [deployment_named(rig, "p")], 0.0)
    assert 0.0 < ranked.ttft_seconds < 1.0
    limits = [
        _limit_seconds(call, msgspec.structs.replace(ranked, ttft_seconds=seconds)) for seconds in (0.1, 2.0, 30.0, 0.0)
    ]
    assert limits == [LATE_MIN_SECONDS, 2.0 * LATE_FACTOR, 50.0, 50.0], "0: the strategy does not predict it"


async def test_a_decode_deployment_that_rejects_the_params_answers_without_them() -> None:
    rig = Rig(policy(), p=Seen(ANSWER), d=Strict(TEXT, DONE))
    assert await rig.chunks(messages=LONG) == [TEXT, DONE]
    assert rig.outcomes == [("p", "prefilled"), ("d", "refused"), ("d", "ok")]
    assert "kv_transfer_params" in deployment_named(rig, "d").failures.last_reason
    assert rig.idle()


async def test_a_request_that_both_deployments_reject_is_refused_as_always() -> None:
    rig = Rig(policy(), p=Seen(ANSWER), d=Seen(opener=status(400, Fault.REFUSED)))
    with pytest.raises(UpstreamRefused):
        await rig.chunks(messages=LONG)
    assert rig.idle()


async def test_an_answer_without_params_is_of_no_use() -> None:
    p, d = Seen(b'{"usage": {"prompt_tokens": 3400, "completion_tokens": 1}}'), decoding()
    rig = Rig(policy(), p=p, d=d)
    await rig.chunks(messages=LONG)
    assert d.calls[0].kv_transfer is None
    assert rig.attempts.done[0].unbilled == Usage(3400, output=1, exact=True), "it was computed all the same"
    assert "kv_transfer_params" in deployment_named(rig, "p").failures.last_reason


async def test_without_a_free_slot_the_prompt_is_computed_where_the_answer_is() -> None:
    p, d = Seen(ANSWER), decoding()
    rig = Rig(policy(), p=p, d=d)
    busy = deployment_named(rig, "p")
    busy.slots_taken = busy.slots
    await rig.chunks(messages=LONG)
    assert (p.opened, rig.outcomes) == (0, [("d", "ok")])
    busy.slots_taken = 0
    assert rig.idle()


async def test_a_prefill_that_would_not_be_done_in_time_is_not_begun() -> None:
    given = policy()
    slow = given.deployments[0].model_copy(update={"prefill_tokens_per_second": 100})  # 34 s for this prompt
    given = given.model_copy(update={"deployments": (slow, *given.deployments[1:])})
    for ttft, prefills in ((60.0, 0), (100.0, 1)):
        p = Seen(ANSWER)
        limits = given.classes["realtime"].model_copy(update={"ttft": ttft})
        rig = Rig(given.model_copy(update={"classes": {**given.classes, "realtime": limits}}), p=p, d=decoding())
        await rig.chunks(messages=LONG)
        assert p.opened == prefills


async def test_a_prefill_deployment_never_answers() -> None:
    p, d = Seen(ANSWER), Seen(opener=ProviderFailure(Fault.CONNECT, "refused"))
    rig = Rig(policy(classes={"realtime": {"ttft": "300ms"}}), p=p, d=d)
    with pytest.raises(Exception, match="no deployment"):
        await rig.chunks(messages=LONG)
    assert all(call.kv_transfer is PREFILL for call in p.calls)
    assert p.opened == 1, "once for a call, however often that is retried"
    assert rig.attempts.last_deployment is None, "the client is billed nothing"


async def test_a_call_that_is_not_answered_after_its_prefill_is_billed_nothing() -> None:
    class Last(Seen):
        async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
            deployment_named(rig, "d").breaker.eject(asyncio.get_running_loop().time(), 60.0)
            return await super().open(call, headers=headers, body=body)

    rig = Rig(policy(), p=Last(ANSWER), d=decoding())
    with pytest.raises(Overloaded, match="no deployment of m is available"):
        await rig.chunks(messages=LONG)
    assert rig.outcomes == [("p", "prefilled")]
    assert rig.attempts.last_deployment is None


async def test_a_failed_decode_deployment_is_replaced_by_another_one() -> None:
    p, d, e = Seen(ANSWER), Seen(opener=status(503)), decoding()
    rig = Rig(policy(decode="de"), p=p, d=d, e=e)
    deployment_named(rig, "e").slots_taken = 10  # so that the other one is tried first
    assert await rig.chunks(messages=LONG) == [TEXT, DONE]
    assert rig.outcomes == [("p", "prefilled"), ("d", "status_503"), ("e", "ok")]
    assert e.calls[0].kv_transfer is None, "the params were the first one's, which may have used them"


def narrow(provider: str = "vllm", **fields: Any) -> Policy:
    """Each deployment has one slot."""
    given = policy(provider, **fields)
    return given.model_copy(
        update={"deployments": tuple(one.model_copy(update={"max_concurrency": 1}) for one in given.deployments)}
    )


async def in_flight(rig: Rig, script: Seen, number: int) -> None:
    """Waits until the deployment has been sent so many requests. No deployment has more calls than slots."""
    async with asyncio.timeout(10):
        while script.opened < number:
            assert all(one.slots_taken <= one.slots for one in rig.fleet)
            await asyncio.sleep(0)


async def test_during_the_prefill_the_decode_deployment_serves_another_call() -> None:
    computed = asyncio.Event()
    p, d = Seen(computed, ANSWER), decoding()
    rig = Rig(narrow(), p=p, d=d)
    long = asyncio.create_task(rig.chunks(messages=LONG))
    await in_flight(rig, p, 1)
    assert await rig.chunks(rig.new_attempts()) == [TEXT, DONE]
    assert d.opened == 1
    computed.set()
    assert await long == [TEXT, DONE]
    assert rig.outcomes == [("p", "prefilled"), ("d", "ok")]
    assert rig.idle()


async def test_after_the_prefill_the_call_gets_the_next_slot_before_queued_calls() -> None:
    computed, answered = asyncio.Event(), asyncio.Event()
    p, d = Seen(computed, ANSWER), Seen(TEXT, answered, DONE)
    rig = Rig(narrow(), p=p, d=d)
    long = asyncio.create_task(rig.chunks(messages=LONG))
    await in_flight(rig, p, 1)
    short = [asyncio.create_task(rig.chunks(rig.new_attempts())) for _ in range(2)]
    await in_flight(rig, d, 1)
    computed.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert (d.opened, p.closed) == (1, 1), "the slot is taken"
    assert deployment_named(rig, "p").slots_taken == 1, "so that prompts that wait for a slot are bounded"
    answered.set()
    assert await asyncio.gather(long, *short) == [[TEXT, DONE]] * 3
    assert [call.kv_transfer is None for call in d.calls] == [True, False, True]
    assert rig.idle()


async def test_a_call_that_finds_no_slot_after_its_prefill_fails_in_time_and_is_not_billed() -> None:
    computed, answered = asyncio.Event(), asyncio.Event()
    p, d = Seen(computed, ANSWER), Seen(TEXT, answered, DONE)
    rig = Rig(narrow(classes={"realtime": {"ttft": "300ms"}}), p=p, d=d)
    long = asyncio.create_task(rig.chunks(messages=LONG))
    await in_flight(rig, p, 1)
    short = asyncio.create_task(rig.chunks(rig.new_attempts()))
    await in_flight(rig, d, 1)
    computed.set()
    with pytest.raises(Overloaded, match="no deployment of m is available"):
        await long
    assert rig.attempts.last_deployment is None
    answered.set()
    assert await short == [TEXT, DONE]
    assert rig.idle()


async def test_a_client_that_leaves_while_its_call_waits_for_a_slot_frees_the_other_one() -> None:
    computed, answered = asyncio.Event(), asyncio.Event()
    p, d = Seen(computed, ANSWER), Seen(TEXT, answered, DONE)
    rig = Rig(narrow(), p=p, d=d)
    long = asyncio.create_task(rig.chunks(messages=LONG))
    await in_flight(rig, p, 1)
    short = asyncio.create_task(rig.chunks(rig.new_attempts()))
    await in_flight(rig, d, 1)
    computed.set()
    for _ in range(20):
        await asyncio.sleep(0)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert [one.slots_taken for one in rig.fleet] == [0, 1]
    answered.set()
    assert await short == [TEXT, DONE]
    assert (d.opened, rig.idle()) == (1, True)


async def test_a_hedged_attempt_that_rejects_the_params_is_repeated_without_them() -> None:
    hedged = {"realtime": {"hedge": {"after": "60s", "budget": 1.0}}}
    p, d, e = Seen(ANSWER), Strict(TEXT, DONE), decoding()
    rig = Rig(policy(decode="de", classes=hedged), p=p, d=d, e=e)
    deployment_named(rig, "e").slots_taken = 1  # so that the other one is tried first
    assert await rig.chunks(messages=LONG) == [TEXT, DONE]
    assert rig.outcomes == [("p", "prefilled"), ("d", "refused"), ("d", "ok")]
    assert (e.opened, rig.attempts.lost_hedges) == (0, [])
    assert "kv_transfer_params" in deployment_named(rig, "d").failures.last_reason
    deployment_named(rig, "e").slots_taken = 0
    assert rig.idle()


async def test_a_hedge_computes_the_prompt_itself() -> None:
    p, d, e = Seen(ANSWER), Seen(asyncio.Event()), decoding()
    hedged = {"realtime": {"hedge": {"after": "1ms", "budget": 1.0}}}
    rig = Rig(policy(decode="de", classes=hedged), p=p, d=d, e=e)
    assert await rig.chunks(messages=LONG) == [TEXT, DONE]
    assert rig.outcomes == [("p", "prefilled"), ("d", "hedge_lost"), ("e", "ok")]
    assert (p.opened, e.calls[0].kv_transfer) == (1, None)
    assert rig.idle()


async def test_a_client_that_leaves_cancels_the_prefill() -> None:
    p, d = Seen(asyncio.Event()), decoding()
    rig = Rig(policy(), p=p, d=d)
    serving = asyncio.create_task(rig.chunks(messages=LONG))
    while not p.opened:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert (rig.outcomes, p.closed, d.opened) == ([("p", "client_gone")], 1, 0)
    last = rig.attempts.last_deployment
    assert last is not None and last.name == "p", "whose record says what the client is billed"
    assert rig.idle()


async def test_prompts_with_a_common_prefix_go_to_the_prefill_deployment_that_has_it() -> None:
    p, q, d, e = Seen(ANSWER), Seen(ANSWER), decoding(), decoding()
    rig = Rig(policy(prefill="pq", decode="de"), p=p, q=q, d=d, e=e)
    await rig.chunks(messages=LONG)
    (home,) = [name for name in "de" if rig.scripts[name].opened]
    full = deployment_named(rig, home)
    full.slots_taken = full.slots  # so that the other one gets the call, which has nothing of the prompt
    attempts = rig.new_attempts()
    await rig.chunks(attempts, messages=LONG)
    assert [attempt.outcome for attempt in attempts.done] == ["prefilled", "ok"]
    assert sorted((p.opened, q.opened)) == [0, 2]


async def test_nothing_waits_for_a_prompt_that_is_computed_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another prompt in the prefill deployment's queue may begin with the same prefix."""
    waited: list[str] = []

    async def wait(call: Call, deployment: DeploymentState, deadline: float, source: DeploymentState | None) -> None:
        waited.append(deployment.name)

    monkeypatch.setattr("gateway.routing.attempt_runner.wait_for_shared_prefill", wait)
    rig = Rig(policy(), p=Seen(ANSWER), d=decoding())
    await rig.chunks(messages=LONG)
    assert (rig.outcomes, waited) == ([("p", "prefilled"), ("d", "ok")], [])


async def test_a_bundled_engine_loads_from_a_prefill_deployment_without_asking_it_again() -> None:
    p, d, e = Seen(ANSWER), decoding(), decoding()
    given = policy("warmpath", decode="de")
    rates = [one.model_copy(update={"kv_transfer_tokens_per_second": 50_000}) for one in given.deployments]
    rig = Rig(given.model_copy(update={"deployments": tuple(rates)}), p=p, d=d, e=e)
    await rig.chunks(messages=LONG)
    (first,) = [name for name in "de" if rig.scripts[name].opened]
    holder = deployment_named(rig, first)
    holder.slots_taken = holder.slots
    attempts = rig.new_attempts()
    await rig.chunks(attempts, messages=LONG)
    assert [(one.outcome, one.blocks_from in ("p", first)) for one in attempts.done] == [("ok", True)]
    other = rig.scripts["e" if first == "d" else "d"]
    assert other.calls[0].kv_transfer in (load_from("http://p.invalid/v1"), load_from(f"http://{first}.invalid/v1"))
    holder.slots_taken = 0
    assert rig.idle()


async def test_the_log_and_the_reason_name_the_prefill_deployment(tmp_path: Path) -> None:
    rig = Rig(policy(routing={"log": True}), p=Seen(ANSWER), d=decoding())
    rig.router = Router(rig.fleet, STRATEGIES, RouteLog(tmp_path, "r"))
    call = a_call(chat(LONG[0]["content"], stream=True), rig.policy, now=asyncio.get_running_loop().time())
    (candidate,) = rig.router.order(call, call.deadline - 1)
    planned = rig.router.prefill_of(call, candidate, 0.0)
    assert planned is not None and planned.deployment.name == "p"
    with await rig.queue.acquire_slot(call) as permit:
        async with rig.router.open(call, permit, rig.attempts) as upstream:
            assert "computed at p, to be loaded" in upstream.chosen.reason
    (row,) = read_routes(tmp_path)
    assert (row.deployment, row.prefill) == ("d", "p")
