"""Discovered deployments in the fleet: they drain when they leave, and keep what was learned about the same pod."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.deployments.departed import KEPT_MAX
from gateway.deployments.fleet import Fleet
from gateway.deployments.instances import Instance, UnusableInstance, deployment_of, needs_model
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import Deployment, Policy
from gateway.providers.offline import OfflineProvider
from tests.gateway.calls import a_call, a_policy


def a_template(**fields: Any) -> Policy:
    engines = {"name": "engines", "source": {"file": "engines.json"}, "model": "served", "max_concurrency": 2}
    return a_policy(
        deployments=[{**engines, **fields}], models=[{"name": "m", "aliases": ["alias"], "deployments": ["engines"]}]
    )


def a_fleet(policy: Policy | None = None) -> Fleet:
    fleet = Fleet(lambda deployment: OfflineProvider())
    fleet.apply(policy or a_template())
    return fleet


def pod(name: str, address: str = "10.0.0.1", uid: str = "") -> Instance:
    return Instance(name, uid or name, address, 8000)


def test_a_template_is_filled_with_the_instance() -> None:
    (template,) = a_template(
        base_url="https://{host}:{port}/{label:path}/v1", kv_events="tcp://{host}:5557", model="{model}"
    ).deployments
    instance = Instance("pod/1", "uid", "fd00::1", 8000, {"path": "p", "model": "llama"})
    made = deployment_of(template, instance)
    assert (made.name, made.base_url, made.model) == ("engines/pod_1", "https://[fd00::1]:8000/p/v1", "llama")
    assert (made.kv_events, made.source, made.max_concurrency) == ("tcp://[fd00::1]:5557", None, 2)
    assert needs_model(template, pod("a")) and not needs_model(template, instance)
    with pytest.raises(UnusableInstance, match="a: base_url: it has no label path"):
        deployment_of(template, pod("a"))


def test_servers_come_and_go_and_calls_in_flight_end_where_they_are() -> None:
    fleet, model = a_fleet(), a_template().models[0]
    freed: list[int] = []
    fleet.on_slot_free = lambda: freed.append(len(fleet.deployments_of(model)))
    assert fleet.deployments_of(model) == [] and fleet.awaits_instances(model)
    fleet.set_instances("engines", [pod("a"), pod("b", "10.0.0.2")])
    assert freed == [2], "queued calls are granted the new slots"
    a, b = fleet.deployments_of(model)
    with SlotPermit(fleet, a):
        fleet.set_instances("engines", [pod("b", "10.0.0.2")])
        assert fleet.deployments_of(model) == [b] and fleet.departed.draining() == {"engines/a": 1}
    assert fleet.departed.draining() == {}


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        (pod("a", "10.0.0.9"), True),
        (pod("a", "10.0.0.9", uid="another pod of this name"), False),
    ],
    ids=["same pod, other address", "other pod of the same name"],
)
def test_what_was_learned_belongs_to_the_pod(after: Instance, kept: bool) -> None:
    fleet = a_fleet()
    fleet.set_instances("engines", [pod("a")])
    (before,) = fleet
    call = a_call(policy=a_template())
    before.send(call, 0.0).end(1.0)
    fleet.set_instances("engines", [after])
    (now,) = fleet
    assert now.config.base_url == "http://10.0.0.9:8000/v1"
    assert (now is before) == kept
    assert (now.shared_id == before.shared_id) == kept, "peers mean the same pod, whichever address they know"


def test_a_pod_that_comes_back_still_has_its_cache() -> None:
    fleet = a_fleet()
    fleet.set_instances("engines", [pod("a"), pod("b", "10.0.0.2")])
    a, _ = fleet
    fleet.set_instances("engines", [pod("b", "10.0.0.2")])
    fleet.set_instances("engines", [pod("a"), pod("b", "10.0.0.2")])
    assert next(iter(fleet)) is a


def test_states_of_departed_servers_are_bounded() -> None:
    fleet = a_fleet()
    for number in range(KEPT_MAX + 20):
        fleet.set_instances("engines", [pod(f"pod-{number}")])
    assert len(fleet.departed._states) <= KEPT_MAX + 1


def test_a_model_without_servers_uses_the_slots_of_its_fallback() -> None:
    policy = a_policy(
        deployments=[
            {"name": "engines", "source": {"file": "f"}, "model": "served"},
            {"name": "vendor", "base_url": "http://vendor.invalid/v1", "model": "big"},
        ],
        models=[
            {"name": "m", "deployments": ["engines"], "fallbacks": ["other"]},
            {"name": "other", "deployments": ["vendor"]},
        ],
    )
    fleet = a_fleet(policy)
    assert [each.name for each in fleet.with_slots_for(policy.models[0])] == ["vendor"]
    fleet.set_instances("engines", [pod("a")])
    assert [each.name for each in fleet.with_slots_for(policy.models[0])] == ["engines/a"]


def test_settings_and_prices_of_a_discovered_deployment_are_those_of_its_template() -> None:
    policy = a_template(price={"input": 1, "output": 2, "currency": "USD"})
    entry = policy.deployment("engines/pod-1")
    assert isinstance(entry, Deployment) and entry.name == "engines"
    assert policy.prices_of("m", "engines/pod-1") is policy.price_lists["m", "engines"]
    assert policy.deployment("other/pod-1") is None and policy.prices_of("m", "gone") is None


def test_a_price_with_a_region_applies_to_the_servers_of_that_region() -> None:
    regional = {"region": "eu", "input": 1, "output": 2, "currency": "USD"}
    everywhere = {"input": 5, "output": 9, "currency": "USD"}
    policy = a_template(region="{label:region}", price=[regional, everywhere])
    (template,) = policy.deployments
    for region, dearest in (("eu", 1), ("us", 5)):
        found = deployment_of(template, Instance("a", "a", "10.0.0.1", 8000, {"region": region}))
        assert found.region == region
        prices = policy.prices_of("m", found.name, found.region)
        assert prices is not None and prices is policy.prices_of("m", found.name, found.region)
        price = prices.price("realtime", None, 0)
        assert price is not None and price.input == dearest
    with pytest.raises(UnusableInstance, match="a: region: it has no label region"):
        deployment_of(template, pod("a"))
    bound = policy.price_bounds.dearest(("t", "m", "realtime", None), 0, 1, 0)
    assert bound == max(price.atoms.input for price in policy.price_lists["m", "engines"].prices)
