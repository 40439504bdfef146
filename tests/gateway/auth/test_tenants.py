"""Stored tenants: what they inherit, what is refused, and how gateways see changes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.auth.authenticator import Authenticator
from gateway.auth.keyring import Keyring
from gateway.auth.records import RecordFeed
from gateway.auth.tenant_directory import TenantDirectory
from gateway.auth.tenants import TenantRegistry
from gateway.core.errors import BadRequest, Conflict, Forbidden, NotFound, StorageUnavailable, Unauthenticated
from gateway.policy import Policy
from gateway.policy.hierarchy import DEPTH_MAX
from gateway.storage.base import StoredRecord
from gateway.storage.memory import MemoryStorage
from tests.gateway.calls import a_policy

PEPPER = "pepper"


class Gateway:
    """One gateway's view of the tenants."""

    def __init__(self, storage: MemoryStorage, policy: Policy) -> None:
        self.policy = policy
        self.feed = RecordFeed(storage)
        self.directory = TenantDirectory(self.feed)
        self.registry = TenantRegistry(self.feed, self.directory, lambda: self.policy)
        self.authenticator = Authenticator(storage, PEPPER, self.directory)


@pytest.fixture
async def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
async def gateway(storage: MemoryStorage) -> Gateway:
    priced = {"pricing": [{"factor": "0.5", "reason": "contract"}], "service_tiers": ["flex"]}
    gateway = Gateway(storage, a_policy(tenants=[{"name": "acme", **priced}, {"name": "t"}]))
    await gateway.feed.refresh()
    return gateway


async def test_a_stored_tenant_has_its_parents_limits_and_prices(gateway: Gateway) -> None:
    limits = {"requests": "5/1m", "budget": {"amount": 2}}
    made = await gateway.registry.create({"name": "team", "parent": "acme", "limits": limits})
    assert made["limits"]["requests"] == {"amount": 5, "period": 60.0}
    await gateway.registry.create({"name": "user", "parent": "team"})
    user = gateway.directory.find("user", gateway.policy)
    assert user is not None
    assert (user.parents, user.root, user.priced_as) == (("acme", "team"), "acme", "acme")
    assert (user.service_tiers, user.pricing) == (("flex",), gateway.policy.tenants[0].pricing)
    assert user.ancestors[1].limits.requests is not None
    assert gateway.directory.find("user", gateway.policy) is user  # the same object, as a cache key


async def test_a_change_makes_new_objects_of_the_tenant_and_its_descendants_only(gateway: Gateway) -> None:
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("other", None)):
        await gateway.registry.create({"name": name, "parent": parent})
    before = {name: gateway.directory.find(name, gateway.policy) for name in ("a", "b", "c", "other")}
    await gateway.registry.change("b", {"limits": {"requests": "1/1m"}})
    after = {name: gateway.directory.find(name, gateway.policy) for name in before}
    assert [name for name in before if before[name] is after[name]] == ["a", "other"]
    assert after["c"] is not None and after["c"].ancestors[1] is after["b"]


async def test_the_policy_wins(gateway: Gateway, storage: MemoryStorage) -> None:
    with pytest.raises(Conflict, match="there is a tenant 't' already"):
        await gateway.registry.create({"name": "t"})
    for act in (gateway.registry.delete("t"), gateway.registry.change("t", {}), gateway.registry.put({"name": "t"})):
        with pytest.raises(Conflict, match="in the policy"):
            await act
    await storage.change_record(StoredRecord("tenant", "t", '{"name": "t", "limits": {"requests": "1/1m"}}'))
    await gateway.feed.refresh()
    found = gateway.directory.find("t", gateway.policy)
    assert found is gateway.policy.tenants_by_name["t"]
    assert [each.name for each in gateway.directory.all(gateway.policy)] == ["acme", "t"]


async def test_another_gateway_sees_changes_and_deletions(gateway: Gateway, storage: MemoryStorage) -> None:
    other = Gateway(storage, gateway.policy)
    with pytest.raises(StorageUnavailable):  # nothing is known yet, so nothing may be called unknown
        other.directory.find("new", other.policy)
    await other.feed.refresh()
    assert other.directory.find("new", other.policy) is None
    await gateway.registry.create({"name": "new"})
    key, _ = await Keyring(storage, PEPPER).create("new")
    headers = {b"authorization": f"Bearer {key}".encode()}
    await other.feed.refresh()
    assert (await other.authenticator.authenticate(headers, other.policy)).tenant.name == "new"
    await gateway.registry.delete("new")
    await other.feed.refresh()
    with pytest.raises(Unauthenticated):
        await other.authenticator.authenticate(headers, other.policy)
    await other.registry.create({"name": "new"})  # the name is free again


async def test_calls_of_a_disabled_tenant_and_of_all_below_it_are_rejected(
    gateway: Gateway, storage: MemoryStorage
) -> None:
    await gateway.registry.create({"name": "project", "parent": "acme"})
    await gateway.registry.create({"name": "team", "parent": "project"})
    key, _ = await Keyring(storage, PEPPER).create("team")
    headers = {b"authorization": f"Bearer {key}".encode()}
    assert (await gateway.authenticator.authenticate(headers, gateway.policy)).tenant.name == "team"
    assert (await gateway.registry.change("project", {"disabled": True}))["disabled"] is True
    with pytest.raises(Forbidden, match="'project' is disabled"):
        await gateway.authenticator.authenticate(headers, gateway.policy)
    await gateway.registry.change("project", {"disabled": False})
    assert (await gateway.authenticator.authenticate(headers, gateway.policy)).tenant.name == "team"


async def test_lost_data_are_lost_for_gateways_too(gateway: Gateway) -> None:
    await gateway.registry.create({"name": "a"})
    gateway.feed._store, gateway.feed._position = MemoryStorage(), ""  # as if the position were of another store
    await gateway.feed.refresh()
    assert gateway.directory.find("a", gateway.policy) is None


async def test_two_writers_do_not_undo_each_other(gateway: Gateway, storage: MemoryStorage) -> None:
    await gateway.registry.create({"name": "a"})
    other = Gateway(storage, gateway.policy)
    await other.feed.refresh()
    await gateway.registry.change("a", {"cache_group": "one"})
    with pytest.raises(Conflict, match="changed by another process"):
        await other.registry.change("a", {"cache_group": "two"})
    assert (await other.registry.change("a", {"models": ["m"]}))["cache_group"] == "one"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"name": ""}, "name", "must not be empty"),
        ({}, "name", "is required"),
        ({"name": "x", "limit": 1}, "limit", "unknown key"),
        ({"name": "x", "keys": []}, "keys", "warmpath keys"),
        ({"name": "x", "pricing": []}, "pricing", "the policy"),
        ({"name": "x", "parent": "unknown"}, "parent", "there is no tenant 'unknown'"),
        ({"name": "x", "parent": "x"}, "parent", "cycle"),
        ({"name": "x", "models": ["gpt"]}, "models", "there is no model 'gpt'"),
        ({"name": "x", "limits": {"requests": "5"}}, "limits.requests", "a rate is"),
        ({"name": "x", "limits": {"parts": [{"match": {"class": "no"}}]}}, "limits.parts.0.match.class", "no class"),
    ],
)
async def test_a_wrong_field_is_named(gateway: Gateway, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as raised:
        await gateway.registry.create(fields)
    assert raised.value.param == param
    assert gateway.directory.names() == []


async def test_no_tenant_becomes_its_own_ancestor_or_too_deep(gateway: Gateway) -> None:
    names = [f"level{number}" for number in range(DEPTH_MAX)]
    for name, parent in zip(names, [None, *names], strict=False):
        await gateway.registry.create({"name": name, "parent": parent})
    with pytest.raises(BadRequest, match="at most 7 ancestors"):
        await gateway.registry.create({"name": "deepest", "parent": names[-1]})
    with pytest.raises(BadRequest, match="cycle"):
        await gateway.registry.change(names[0], {"parent": names[3]})
    with pytest.raises(BadRequest, match="descendants"):
        await gateway.registry.change(names[0], {"parent": "acme"})
    with pytest.raises(Conflict, match="is the parent of level1"):
        await gateway.registry.delete(names[0])
    with pytest.raises(BadRequest, match="renamed"):
        await gateway.registry.change(names[0], {"name": "another"})
    with pytest.raises(NotFound):
        await gateway.registry.delete("unknown")


async def test_a_tenant_whose_parent_left_the_policy_may_not_call(gateway: Gateway) -> None:
    await gateway.registry.create({"name": "team", "parent": "acme"})
    assert gateway.directory.find("team", gateway.policy) is not None
    gateway.policy = a_policy(tenants=[{"name": "t"}])
    assert gateway.directory.find("team", gateway.policy) is None


async def test_an_export_is_imported_elsewhere(gateway: Gateway) -> None:
    for name, parent in (("a", "z"), ("z", "acme"), ("m", None)):
        await gateway.registry.put({"name": "z"} if name == "a" else {"name": name, "parent": parent})
    await gateway.registry.put({"name": "a", "parent": "z", "limits": {"budget": {"amount": "1.5", "per": "day"}}})
    exported = gateway.registry.export()
    assert [each["name"] for each in exported] == ["m", "z", "a"]  # each after its parent
    other = Gateway(MemoryStorage(), gateway.policy)
    await other.feed.refresh()
    for each in exported:
        await other.registry.put(each)
    assert other.registry.export() == exported
    a_tenant = other.directory.find("a", other.policy)
    assert a_tenant is not None and a_tenant.limits == other.directory.stored("a").limits  # type: ignore[union-attr]
