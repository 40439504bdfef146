"""Servers and their places; reloads are in `test_queueing`, what is expected of servers in `prefix`."""

from __future__ import annotations

from gateway.fleet import Fleet, Place
from gateway.policy import Deployment, Policy
from gateway.providers.base import Provider, Unasked
from tests.gateway.calls import a_policy


def test_a_provider_is_made_anew_only_for_what_has_changed() -> None:
    made: list[str] = []

    def make(deployment: Deployment) -> Provider:
        made.append(deployment.name)
        return Unasked()

    policy = a_policy()
    known = Fleet(make)
    known.apply(policy)
    known.apply(a_policy())
    changed = policy.model_dump(by_alias=True)
    changed["deployments"][1]["max_concurrency"] = 3
    known.apply(Policy.model_validate(changed))
    assert made == ["a", "b", "b"]


def test_the_least_busy_by_share_gives_its_place_first() -> None:
    policy = a_policy().model_dump(by_alias=True)
    policy["deployments"][0]["max_concurrency"] = 4
    known = Fleet(lambda deployment: Unasked())
    known.apply(Policy.model_validate(policy))
    servers = list(known)
    places = [known.take(servers) for _ in range(6)]
    assert [server.places_taken for server in servers] == [4, 2]
    assert known.take(servers) is None
    freed: list[bool] = []
    known.on_free = lambda: freed.append(True)
    for place in places:
        assert isinstance(place, Place)
        place.release()
        place.release()
    assert [server.places_taken for server in servers] == [0, 0] and len(freed) == 6
