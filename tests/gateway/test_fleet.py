"""Servers and their places; reloads are in `test_queueing`, what is expected of servers in `prefix`."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_what_was_believed_counts_for_as_long_as_it_is_so() -> None:
    known = Fleet(lambda deployment: Unasked())
    known.apply(a_policy())
    server, now = next(iter(known)), 1.0
    call = SimpleNamespace(fingerprint=(1, 2, 3), prompt_tokens_estimate=200, session=None, may_be_held=False)
    before = server.cache.recall(call.fingerprint)
    first = server.send(call, now, believed=before)
    assert first.note.believed is before
    assert server.send(call, now, believed=before).note.believed.matched == 3, "it was sent meanwhile"
