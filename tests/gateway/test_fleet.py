"""What is known of servers; places and reloads are in `test_queueing`, choices in `routing`."""

from __future__ import annotations

import pytest

from gateway import fleet as module
from gateway.fleet import Fleet, Place, Server
from gateway.policy import Deployment, Policy
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.providers.base import Provider, Unasked
from tests.gateway.calls import a_policy


def a_server(**changes: object) -> Server:
    return Server(
        Deployment.model_validate({"name": "a", "base_url": "http://a.invalid/v1", "model": "m", **changes}), Unasked()
    )


def test_a_belief_that_was_mostly_wrong_is_dropped_whole() -> None:
    server = a_server()
    server.cache.add([1, 2, 3, 4])
    server.learn_cached([1, 2, 3, 4], 4 * BLOCK_TOKENS, 0)  # it has never said anything about its cache
    assert server.cache.match([1, 2, 3, 4]) == 4
    server.learn_cached([1, 2, 3, 4], 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    server.cache.add([9])
    server.learn_cached([1, 2], 4 * BLOCK_TOKENS, 0)  # now its word counts
    assert server.cache.match([9]) == 0 and server.cache.match([1, 2]) == 2


@pytest.mark.parametrize(("tokens", "seconds"), [(module.RATE_MIN_TOKENS - 1, 1.0), (1000, 0.0)])
def test_what_tells_nothing_about_its_speed_is_not_learnt(tokens: int, seconds: float) -> None:
    server = a_server()
    before = server.prefill_tokens_per_second
    server.learn_prefill(tokens, seconds)
    assert server.prefill_tokens_per_second == before


def test_its_speed_follows_what_is_observed() -> None:
    server = a_server()
    for _ in range(100):
        server.learn_prefill(1000, 0.5)
    assert server.prefill_tokens_per_second == pytest.approx(2000, rel=0.01)


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
