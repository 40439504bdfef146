"""From which deployment a prompt's beginning is loaded, and what its estimates then learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from gateway.core.kv_transfer import load_from
from gateway.deployments.fleet import Fleet
from gateway.deployments.state import LOADS_PAUSE_SECONDS, DeploymentState
from gateway.endpoints import ENDPOINTS
from gateway.explanation import Explainer
from gateway.policy import Deployment, Policy
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.providers.offline import OfflineProvider
from gateway.routing import STRATEGIES
from gateway.routing.base import Candidate
from gateway.routing.block_source import with_block_source
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.router import Router
from gateway.types import Call, Principal
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.routing.rig import DONE, TEXT, Rig, Script, deployment_named

LONG = chat("All the world is a stage, and all the men and women merely players. " * 200)
RATE = 20_000


def policy(*names: str, **fields: Any) -> Policy:
    """Deployments of one model that load blocks from each other."""
    common = {"provider": "warmpath", "model": "served", "kv_transfer_tokens_per_second": RATE, **fields}
    return a_policy(
        deployments=[{"name": name, "base_url": f"http://{name}.invalid:8000/v1", **common} for name in names],
        models=[{"name": "m", "deployments": list(names)}],
    )


def fleet_of(given: Policy) -> dict[str, DeploymentState]:
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(given)
    return {deployment.name: deployment for deployment in fleet}


def source_of(call: Call, target: str, deployments: dict[str, DeploymentState]) -> str | None:
    """From where the target loads the beginning of the call's prompt."""
    candidates = PrefixAffinity().order(call, list(deployments.values()), now=0.0)
    (own,) = (one for one in candidates if one.deployment.name == target)
    source = with_block_source(call.fingerprint, own, candidates, 0.0).block_source
    return None if source is None else source.deployment.name


def test_the_holder_of_the_longest_prefix_is_the_source() -> None:
    given = policy("a", "b", "c")
    deployments, call = fleet_of(given), a_call(LONG, given)
    deployments["b"].cache.add(call.fingerprint)
    deployments["c"].cache.add(call.fingerprint[:10])
    assert source_of(call, "a", deployments) == "b"
    assert source_of(call, "c", deployments) == "b"
    assert source_of(call, "b", deployments) is None
    assert source_of(a_call(chat("another prompt " * 500), given), "a", deployments) is None


@pytest.mark.parametrize(("rate", "expected"), [(2500, "b"), (1500, None)])
def test_blocks_are_loaded_only_if_that_is_faster_than_to_compute_them(rate: int, expected: str | None) -> None:
    """The policy's guess of the prefill speed is 2,000 tokens per second."""
    given = policy("a", "b", kv_transfer_tokens_per_second=rate)
    deployments, call = fleet_of(given), a_call(LONG, given)
    deployments["b"].cache.add(call.fingerprint)
    assert source_of(call, "a", deployments) == expected


def test_a_short_prefix_is_not_worth_a_connection() -> None:
    given = policy("a", "b", prefill_tokens_per_second=10_000)
    deployments, call = fleet_of(given), a_call(LONG, given)
    deployments["b"].cache.add(call.fingerprint[: 100 // BLOCK_TOKENS])
    assert source_of(call, "a", deployments) is None


@pytest.mark.parametrize(
    "unfit",
    [{"kv_transfer_tokens_per_second": None}, {"model": "another"}],
    ids=["transfers no blocks", "another model"],
)
def test_other_deployments_are_no_source(unfit: dict[str, Any]) -> None:
    given = policy("a", "b", "c")
    b = given.deployments[1].model_copy(update=unfit)
    given = given.model_copy(update={"deployments": (given.deployments[0], b, given.deployments[2])})
    deployments, call = fleet_of(given), a_call(LONG, given)
    deployments["b"].cache.add(call.fingerprint)
    assert source_of(call, "a", deployments) is None
    deployments["c"].cache.add(call.fingerprint[:20])
    assert source_of(call, "a", deployments) == "c", "it has less, but it fits"


def test_a_deployment_that_failed_is_no_source() -> None:
    given = policy("a", "b")
    deployments, call = fleet_of(given), a_call(LONG, given)
    deployments["b"].cache.add(call.fingerprint)
    assert source_of(call, "a", deployments) == "b"
    deployments["b"].breaker.eject(0.0, 60.0)
    assert source_of(call, "a", deployments) is None


def test_only_an_idle_deployment_waits_for_what_another_one_still_computes() -> None:
    given = policy("a", "b", "c")
    deployments, call = fleet_of(given), a_call(LONG, given)
    sent = deployments["b"].send(call, 0.0)
    assert source_of(call, "a", deployments) == "b"
    deployments["a"].send(a_call(chat("another prompt " * 500), given), 0.0)
    assert source_of(call, "a", deployments) is None, "others would overtake it in the queue"
    sent.first_chunk(1.0)
    assert source_of(call, "a", deployments) == "b"


def test_a_long_queue_is_not_waited_for() -> None:
    given = policy("a", "b")
    deployments, call = fleet_of(given), a_call(LONG, given)
    for number in range(3):
        deployments["b"].send(a_call(chat(f"prompt {number} " * 2000), given), 0.0)
    deployments["b"].send(call, 0.0)
    assert source_of(call, "a", deployments) is None


def test_blocks_that_are_computed_already_are_preferred() -> None:
    given = policy("a", "b", "c")
    deployments, call = fleet_of(given), a_call(LONG, given)
    deployments["b"].send(call, 0.0)
    deployments["c"].cache.add(call.fingerprint[:-4])
    assert source_of(call, "a", deployments) == "c"


def test_a_call_goes_where_its_prompt_is_loaded_if_the_holder_is_busy() -> None:
    """Without transfers, it would wait there, and not compute its prompt again."""
    for rate, expected in ((RATE, "a"), (None, "b")):
        given = policy("a", "b", kv_transfer_tokens_per_second=rate)
        deployments, call = fleet_of(given), a_call(LONG, given)
        deployments["b"].cache.add(call.fingerprint)
        deployments["b"].send(a_call(chat("another prompt " * 200), given), 0.0)
        ranked = PrefixAffinity().order(call, list(deployments.values()), now=0.0)
        assert ranked[0].deployment.name == expected
        assert ranked[0].matched_tokens == (0 if expected == "a" else len(call.fingerprint) * BLOCK_TOKENS)


def test_a_conversation_moves_and_leaves_what_others_share() -> None:
    given = policy("a", "b")
    deployments = fleet_of(given)
    text = LONG["messages"][0]["content"]
    one, other = (a_call(chat(f"{text} {name} " + f"{name} " * 600), given) for name in ("one", "other"))
    a, b = deployments["a"], deployments["b"]
    for call in (one, other):
        b.cache.add(call.fingerprint)
    shared = next(depth for depth, block in enumerate(one.fingerprint) if block != other.fingerprint[depth])
    length = len(one.fingerprint)
    sent = a.send(one, 0.0)
    kept_tokens = sent.expect_loaded(b, length, moves=False)
    assert (kept_tokens, b.cache.match(one.fingerprint)) == (None, length)
    kept_tokens = sent.expect_loaded(b, length, moves=True)
    assert kept_tokens == (shared + 1) * BLOCK_TOKENS
    assert b.cache.match(one.fingerprint) == shared + 1
    assert b.cache.match(other.fingerprint) == len(other.fingerprint)
    assert a.send(a_call(LONG, given), 0.0).expect_loaded(b, shared, moves=True) is None, "several continue it"


def test_a_prefill_deployment_keeps_its_blocks() -> None:
    given = policy("a", "b")
    roles = [
        one.model_copy(update={"role": role})
        for one, role in zip(given.deployments, ("decode", "prefill"), strict=True)
    ]
    deployments, call = fleet_of(given.model_copy(update={"deployments": tuple(roles)})), a_call(LONG, given)
    deployments["b"].cache.add(call.fingerprint)
    assert deployments["a"].send(call, 0.0).expect_loaded(deployments["b"], 10, moves=True) is None


def test_after_loads_have_failed_repeatedly_none_is_expected_for_a_while() -> None:
    given = policy("a", "b")
    deployments, call = fleet_of(given), a_call(LONG, given)
    a, b = deployments["a"], deployments["b"]
    b.cache.add(call.fingerprint)
    a.estimate.reports_cached = True
    tokens = call.prompt_tokens_estimate

    def load(now: float, cached_tokens: int) -> None:
        a.cache.clear()
        sent = a.send(call, now)
        sent.expect_loaded(b, len(call.fingerprint), moves=False)
        sent.first_chunk(now)
        sent.learn_cached(tokens, cached_tokens)
        sent.learn_usage(call.id, tokens, cached_tokens, 5)
        sent.end(now)
        a.cache.clear()

    for cached_tokens in (0, 0, tokens - 10, 0, 0):
        load(0.0, cached_tokens)
    assert source_of(call, "a", deployments) == "b", "one of them has succeeded in between"
    load(0.0, 0)
    assert source_of(call, "a", deployments) is None
    assert a.loads_resume_at == LOADS_PAUSE_SECONDS
    a.loads_resume_at = 0.0
    assert source_of(call, "a", deployments) == "b"


def test_what_is_loaded_is_neither_queued_work_nor_a_measurement() -> None:
    given = policy("a", "b")
    deployments, call = fleet_of(given), a_call(LONG, given)
    a, matched = deployments["a"], len(call.fingerprint) - 2
    speed = a.estimate.prefill_tokens_per_second
    sent = a.send(call, 0.0)
    sent.expect_loaded(deployments["b"], matched, moves=True)
    left = call.prompt_tokens_estimate - matched * BLOCK_TOKENS
    assert a.estimate.queue.tokens == left
    assert a.estimate.queued_work(0.0) == pytest.approx(left, rel=0.01)
    assert sent.predicted_cached_tokens == pytest.approx(matched * BLOCK_TOKENS, rel=0.01)
    sent.first_chunk(0.01)  # would be an incredible speed, if the prompt had been computed
    sent.learn_cached(call.prompt_tokens_estimate, matched * BLOCK_TOKENS)
    sent.learn_usage(call.id, call.prompt_tokens_estimate, matched * BLOCK_TOKENS, 5)
    sent.end(0.02)
    assert a.estimate.queue.tokens == 0
    assert a.estimate.queued_work(1.0) == 0
    assert a.estimate.prefill_tokens_per_second == speed
    assert not a.estimate.reports_cached
    assert a.cache.match(call.fingerprint) == len(call.fingerprint), "it is cached there, too"


def test_the_reason_names_the_source() -> None:
    given = policy("a", "b")
    deployments, call = fleet_of(given), a_call(LONG, given)
    deployments["b"].cache.add(call.fingerprint)
    candidates: list[Candidate] = PrefixAffinity().order(call, list(deployments.values()), now=0.0)
    (own,) = (one for one in candidates if one.deployment.name == "a")
    tokens = len(call.fingerprint) * BLOCK_TOKENS
    assert f"cache ({tokens} at b, to be loaded)" in with_block_source(call.fingerprint, own, candidates, 0.0).reason
    assert "loaded" not in own.reason


async def test_explanations_name_the_source() -> None:
    given = policy("a", "b")
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(given)
    call = a_call(LONG, given)
    next(one for one in fleet if one.name == "b").cache.add(call.fingerprint)
    explainer = Explainer(given, fleet, Router(fleet, STRATEGIES), b"secret")
    explained = explainer.explain(ENDPOINTS[0], msgspec.json.encode(LONG), {}, Principal(given.tenants[0], "k"))
    sources = {one.deployment.name: one.block_source for one in explained.candidates}
    assert sources["b"] is None
    assert sources["a"] is not None and sources["a"].deployment.name == "b"


class Seen(Script):
    """Remembers the calls that it was sent."""

    def __init__(self) -> None:
        super().__init__(TEXT, DONE)
        self.calls: list[Call] = []

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        self.calls.append(call)
        return await super().open(call, headers=headers, body=body)


async def test_the_request_names_the_source_and_the_log_keeps_it() -> None:
    scripts = {"a": Seen(), "b": Seen()}
    rig = Rig(policy("a", "b", max_concurrency=1), **scripts)
    await rig.chunks(messages=LONG["messages"])
    first = rig.attempts.done[-1]
    assert first.blocks_from is None
    holder = deployment_named(rig, first.deployment)
    holder.slots_taken = holder.slots  # by calls of others
    await rig.chunks(messages=LONG["messages"])
    second = rig.attempts.done[-1]
    assert second.deployment != first.deployment == second.blocks_from
    calls = [call.kv_transfer for name in (first.deployment, second.deployment) for call in scripts[name].calls]
    loads = load_from(f"http://{first.deployment}.invalid:8000/v1", kept_tokens=0)
    assert [call and bytes(call) for call in calls] == [None, bytes(loads)]
    assert holder.cache.match(scripts[first.deployment].calls[0].fingerprint) == 0, "the conversation has moved"
    assert second.predicted_cached_tokens > 0
    holder.slots_taken = 0
    assert rig.idle()


class LoadsNothing(Seen):
    """An engine that was started without the option to load blocks."""

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        response = await super().open(call, headers=headers, body=body)
        if call.kv_transfer is not None:
            raise ProviderFailure(Fault.REFUSED, "requires --kv-transfer-peers", status=400, body=b"{}")
        return response


async def test_an_engine_that_rejects_the_field_gets_the_call_without_it() -> None:
    scripts = {"a": LoadsNothing(), "b": LoadsNothing()}
    rig = Rig(policy("a", "b", max_concurrency=1), **scripts)
    await rig.chunks(messages=LONG["messages"])
    first = rig.attempts.done[-1].deployment
    holder = deployment_named(rig, first)
    holder.slots_taken = holder.slots  # by calls of others
    assert await rig.chunks(messages=LONG["messages"]) == [TEXT, DONE]
    target = deployment_named(rig, "b" if first == "a" else "a")
    calls = scripts[target.name].calls
    assert [call.kv_transfer is None for call in calls] == [False, True]
    assert target.failures.last_reason == "it rejected kv_transfer_params with status 400; does it load blocks?"
    target.cache.clear()
    assert await rig.chunks(messages=LONG["messages"]) == [TEXT, DONE]
    assert calls[-1].kv_transfer is None, "the field is not sent again for a while"
    assert len(calls) == 3
    assert target.breaker.open is False
    holder.slots_taken = 0
    assert rig.idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"provider": "vllm"}, "only warmpath has"), ({"base_url": "https://a.invalid/v1"}, "must begin with http://")],
)
def test_a_deployment_that_cannot_transfer_blocks_is_rejected(fields: dict[str, Any], message: str) -> None:
    given = {"name": "a", "base_url": "http://a.invalid/v1", "provider": "warmpath", "model": "m"}
    with pytest.raises(ValueError, match=message):
        Deployment.model_validate({**given, "kv_transfer_tokens_per_second": "50k", **fields})
