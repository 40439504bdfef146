"""Servers and their places; reloads are in `test_queueing`, what is expected of servers in `prefix`."""

from __future__ import annotations

from types import SimpleNamespace

from gateway.deployments.fleet import PEAK_DECAY_SECONDS, DeploymentState, Fleet, SlotPermit
from gateway.policy import Deployment, Policy
from gateway.prefix.estimate import ReportedLoad
from gateway.providers.base import OfflineProvider, Provider
from tests.gateway.calls import a_policy


def test_a_provider_is_made_anew_only_for_what_has_changed() -> None:
    made: list[str] = []

    def make(deployment: Deployment) -> Provider:
        made.append(deployment.name)
        return OfflineProvider()

    policy = a_policy()
    known = Fleet(make)
    known.apply(policy)
    known.apply(a_policy())
    changed = policy.model_dump(by_alias=True)
    changed["deployments"][1]["max_concurrency"] = 3
    known.apply(Policy.model_validate(changed))
    assert made == ["a", "b", "b"]


def test_a_model_has_the_servers_of_the_policy_that_is_in_force() -> None:
    known, policy = Fleet(lambda deployment: OfflineProvider()), a_policy()
    (model,) = policy.models
    known.apply(policy)
    assert [server.name for server in known.deployments_of(model)] == list(model.deployments) == ["a", "b"]
    fewer = policy.model_dump(by_alias=True)
    fewer["models"][0]["deployments"] = ["a"]
    known.apply(Policy.model_validate({**fewer, "deployments": fewer["deployments"][:1]}))
    assert [server.name for server in known.deployments_of(model)] == ["a"], "also of a call that came before"


def test_the_least_busy_by_share_gives_its_place_first() -> None:
    policy = a_policy().model_dump(by_alias=True)
    policy["deployments"][0]["max_concurrency"] = 4
    known = Fleet(lambda deployment: OfflineProvider())
    known.apply(Policy.model_validate(policy))
    servers = list(known)
    places = [known.take(servers, 0.0) for _ in range(6)]
    assert [server.slots_taken for server in servers] == [4, 2]
    assert known.take(servers, 0.0) is None
    freed: list[bool] = []
    known.on_slot_free = lambda: freed.append(True)
    for place in places:
        assert isinstance(place, SlotPermit)
        place.release()
        place.release()
    assert [server.slots_taken for server in servers] == [0, 0] and len(freed) == 6


def with_four_places() -> tuple[Fleet, DeploymentState]:
    policy = a_policy().model_dump(by_alias=True)
    policy["deployments"][0]["max_concurrency"] = 4
    known = Fleet(lambda deployment: OfflineProvider())
    known.apply(Policy.model_validate(policy))
    return known, next(iter(known))


def fill(known: Fleet, server: DeploymentState, now: float) -> list[SlotPermit]:
    """All the places that calls which may be held can have now."""
    places = []
    while server.has_room_for_background(now):
        place = known.take([server], now, background=True)
        assert place is not None
        places.append(place)
    return places


def test_background_has_what_others_leave_at_their_busiest_until_that_is_long_ago() -> None:
    known, server = with_four_places()
    for place in [known.take([server], 0.0) for _ in range(3)]:
        assert place is not None
        place.release()
    background = fill(known, server, 1.0)
    assert (len(background), server.background.taken) == (1, 1)
    urgent = known.take([server], 2.0)
    assert urgent is not None and not server.has_room_for_background(2.0)
    urgent.release()
    background += fill(known, server, 2.0 + 10 * PEAK_DECAY_SECONDS)
    assert len(background) == 4
    for place in background:
        place.release()
    assert (server.background.taken, server.slots_taken) == (0, 0)


def test_background_has_one_place_where_nobody_else_is_there_and_none_where_no_place_is_left() -> None:
    known, server = with_four_places()
    urgent = [known.take([server], 0.0) for _ in range(4)]
    assert not server.has_room_for_background(0.0)
    for place in urgent[1:]:
        assert place is not None
        place.release()
    assert not server.has_room_for_background(0.0)  # one is there, and just now there were three more
    assert urgent[0] is not None
    urgent[0].release()
    assert len(fill(known, server, 0.0)) == 1


def test_background_waits_where_the_server_says_that_calls_wait_there() -> None:
    known, server = with_four_places()
    server.estimate.load = ReportedLoad(at=0.0, running=4, waiting=1)
    assert len(fill(known, server, 1.0)) == 1
    assert server.has_room_for_background(100.0)  # what was said is too old


def test_background_moves_with_its_place() -> None:
    known, server = with_four_places()
    other = list(known)[1]
    (place, *_) = fill(known, server, 0.0)
    assert place.move_to(other)
    assert (server.background.taken, other.background.taken) == (3, 1)


def test_what_was_believed_counts_for_as_long_as_it_is_so() -> None:
    known = Fleet(lambda deployment: OfflineProvider())
    known.apply(a_policy())
    server, now = next(iter(known)), 1.0
    call = SimpleNamespace(fingerprint=(1, 2, 3), prompt_tokens_estimate=200, session=None, may_be_held=False)
    before = server.cache.predict(call.fingerprint)
    first = server.send(call, now, prediction=before)
    assert first.prompt.prediction is before
    assert server.send(call, now, prediction=before).prompt.prediction.matched == 3, "it was sent meanwhile"
