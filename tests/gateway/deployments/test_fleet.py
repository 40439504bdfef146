"""Deployments and their slots. Reloads are tested in `queueing`, estimates in `prefix`."""

from __future__ import annotations

from types import SimpleNamespace

from gateway.deployments.background_slots import PEAK_DECAY_SECONDS
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.deployments.state import DeploymentState
from gateway.policy import Deployment, Policy
from gateway.prefix.in_flight import ReportedLoad
from gateway.providers.base import Provider
from gateway.providers.offline import OfflineProvider
from tests.gateway.calls import a_policy


def test_a_provider_is_replaced_only_if_its_configuration_changed() -> None:
    made: list[str] = []

    def make(deployment: Deployment) -> Provider:
        made.append(deployment.name)
        return OfflineProvider()

    policy = a_policy()
    fleet = Fleet(make)
    fleet.apply(policy)
    fleet.apply(a_policy())
    changed = policy.model_dump(by_alias=True)
    changed["deployments"][1]["max_concurrency"] = 3
    fleet.apply(Policy.model_validate(changed))
    assert made == ["a", "b", "b"]


def test_prefill_deployments_answer_no_calls_and_are_no_alternative_to_those_that_do() -> None:
    roles = {"p": "prefill", "d": "decode", "e": "decode", "q": "prefill"}
    common = {"provider": "vllm", "model": "served"}
    deployments = [{"name": n, "base_url": f"http://{n}.invalid/v1", "role": r, **common} for n, r in roles.items()]
    policy = a_policy(deployments=deployments, models=[{"name": "m", "deployments": list(roles)}])
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(policy)
    (model,) = policy.models
    assert [each.name for each in fleet.deployments_of(model)] == ["d", "e"]
    assert [each.name for each in fleet.prefill_deployments_of(model)] == ["p", "q"]
    p, d, e, q = (fleet.find(name) for name in roles)
    assert p and d and e and q
    assert p.estimate.traffic is q.estimate.traffic is not d.estimate.traffic is e.estimate.traffic
    permit = fleet.take(fleet.deployments_of(model), 0.0)
    assert permit is not None and not (permit.is_at(p) or permit.is_at(q))
    permit.release()
    fleet.apply(
        a_policy(
            deployments=[{**each, "role": None} for each in deployments],
            models=[{"name": "m", "deployments": list(roles)}],
        )
    )
    assert [each.name for each in fleet.deployments_of(model)] == list(roles), "after a reload without roles"
    assert len({id(each.estimate.traffic) for each in fleet}) == 1


def test_a_model_has_the_deployments_of_the_current_policy() -> None:
    fleet, policy = Fleet(lambda deployment: OfflineProvider()), a_policy()
    (model,) = policy.models
    fleet.apply(policy)
    assert [deployment.name for deployment in fleet.deployments_of(model)] == list(model.deployments) == ["a", "b"]
    fewer = policy.model_dump(by_alias=True)
    fewer["models"][0]["deployments"] = ["a"]
    fleet.apply(Policy.model_validate({**fewer, "deployments": fewer["deployments"][:1]}))
    assert [deployment.name for deployment in fleet.deployments_of(model)] == ["a"], "also of a call that came before"


def test_deployments_of_one_model_share_what_its_calls_have_in_common() -> None:
    def policy_of(models: dict[str, list[str]]) -> Policy:
        document = a_policy().model_dump(by_alias=True)
        document["deployments"] = [{**document["deployments"][0], "name": name} for name in "wxyz"]
        document["models"] = [
            {**document["models"][0], "name": name, "aliases": [], "deployments": d} for name, d in models.items()
        ]
        return Policy.model_validate({**document, "rules": ()})

    fleet = Fleet(lambda deployment: OfflineProvider())

    def groups(models: dict[str, list[str]]) -> set[str]:
        fleet.apply(policy_of(models))
        names: dict[int, str] = {}
        for deployment in fleet:
            names[id(deployment.estimate.traffic)] = names.get(id(deployment.estimate.traffic), "") + deployment.name
        return set(names.values())

    assert groups({"one": ["w", "x"], "two": ["y"], "three": ["z", "y"]}) == {"wx", "yz"}
    assert groups({"one": ["w", "x"], "two": ["y"], "three": ["z", "w"]}) == {"wxz", "y"}
    assert groups({"one": ["w"], "two": ["x"], "three": ["y", "z"]}) == {"w", "x", "yz"}


def test_slots_are_taken_at_the_deployment_with_the_smallest_share_in_use() -> None:
    policy = a_policy().model_dump(by_alias=True)
    policy["deployments"][0]["max_concurrency"] = 4
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(Policy.model_validate(policy))
    deployments = list(fleet)
    permits = [fleet.take(deployments, 0.0) for _ in range(6)]
    assert [deployment.slots_taken for deployment in deployments] == [4, 2]
    assert fleet.take(deployments, 0.0) is None
    freed: list[bool] = []
    fleet.on_slot_free = lambda: freed.append(True)
    for permit in permits:
        assert isinstance(permit, SlotPermit)
        permit.release()
        permit.release()
    assert [deployment.slots_taken for deployment in deployments] == [0, 0] and len(freed) == 6


def four_slots() -> tuple[Fleet, DeploymentState]:
    policy = a_policy().model_dump(by_alias=True)
    policy["deployments"][0]["max_concurrency"] = 4
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(Policy.model_validate(policy))
    return fleet, next(iter(fleet))


def take_background_slots(fleet: Fleet, deployment: DeploymentState, now: float) -> list[SlotPermit]:
    """Take all slots that background calls may use now."""
    permits = []
    while deployment.has_room_for_background(now):
        permit = fleet.take([deployment], now, background=True)
        assert permit is not None
        permits.append(permit)
    return permits


def test_background_calls_get_the_slots_left_at_the_recent_peak() -> None:
    fleet, deployment = four_slots()
    for permit in [fleet.take([deployment], 0.0) for _ in range(3)]:
        assert permit is not None
        permit.release()
    background = take_background_slots(fleet, deployment, 1.0)
    assert (len(background), deployment.background.taken) == (1, 1)
    urgent = fleet.take([deployment], 2.0)
    assert urgent is not None and not deployment.has_room_for_background(2.0)
    urgent.release()
    background += take_background_slots(fleet, deployment, 2.0 + 10 * PEAK_DECAY_SECONDS)
    assert len(background) == 4
    for permit in background:
        permit.release()
    assert (deployment.background.taken, deployment.slots_taken) == (0, 0)


def test_one_background_call_runs_on_an_idle_deployment_and_none_on_a_full_one() -> None:
    fleet, deployment = four_slots()
    urgent = [fleet.take([deployment], 0.0) for _ in range(4)]
    assert not deployment.has_room_for_background(0.0)
    for permit in urgent[1:]:
        assert permit is not None
        permit.release()
    assert not deployment.has_room_for_background(0.0)  # one slot is in use, and the recent peak was four
    assert urgent[0] is not None
    urgent[0].release()
    assert len(take_background_slots(fleet, deployment, 0.0)) == 1


def test_background_calls_wait_while_the_engine_reports_a_queue() -> None:
    fleet, deployment = four_slots()
    deployment.estimate.load = ReportedLoad(at=0.0, running=4, waiting=1)
    assert len(take_background_slots(fleet, deployment, 1.0)) == 1
    assert deployment.has_room_for_background(100.0)  # the report is too old


def test_background_slots_move_with_their_permit() -> None:
    fleet, deployment = four_slots()
    other = list(fleet)[1]
    (permit, *_) = take_background_slots(fleet, deployment, 0.0)
    assert permit.move_to(other)
    assert (deployment.background.taken, other.background.taken) == (3, 1)


def test_a_prediction_is_used_while_it_is_current() -> None:
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(a_policy())
    deployment, now = next(iter(fleet)), 1.0
    call = SimpleNamespace(
        fingerprint=(1, 2, 3), prompt_tokens_estimate=200, session=None, tenant_name="t", may_be_held=False
    )
    before = deployment.cache.predict(call.fingerprint)
    first = deployment.send(call, now, prediction=before)
    assert first.prompt.prediction is before
    assert deployment.send(call, now, prediction=before).prompt.prediction.matched == 3, "it was sent meanwhile"
