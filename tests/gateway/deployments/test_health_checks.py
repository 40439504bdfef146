"""What is learned about servers beside calls, with providers that say how they are."""

from __future__ import annotations

import asyncio

import pytest

from gateway.deployments.circuit_breaker import FAILURES_TO_OPEN
from gateway.deployments.fleet import DeploymentState, Fleet
from gateway.deployments.health_checks import (
    EJECTION_SECONDS,
    IDLE_SECONDS,
    OUTLIER_MIN_SAMPLES,
    SAMPLE_MAX_AGE_SECONDS,
    HealthChecks,
    eject_outliers,
)
from gateway.policy import Deployment
from gateway.prefix.working_set import WorkingSet
from gateway.providers.base import OfflineProvider
from tests.gateway.calls import a_policy


class Patient(OfflineProvider):
    def __init__(self) -> None:
        self.well = True
        self.asked = 0

    async def healthy(self) -> bool:
        self.asked += 1
        return self.well


@pytest.fixture
def providers() -> dict[str, Patient]:
    return {"a": Patient(), "b": Patient(), "c": Patient()}


@pytest.fixture
def fleet(providers: dict[str, Patient]) -> Fleet:
    def provider(deployment: Deployment) -> Patient:
        return providers.setdefault(deployment.name, Patient())

    fleet = Fleet(provider)
    fleet.apply(a_policy())
    return fleet


def named(fleet: Fleet, name: str) -> DeploymentState:
    return next(server for server in fleet if server.name == name)


async def test_a_failing_server_is_used_again_as_soon_as_it_is_well(
    fleet: Fleet, providers: dict[str, Patient]
) -> None:
    checks, now, a = HealthChecks(fleet), asyncio.get_running_loop().time(), named(fleet, "a")
    await checks.check_once()
    assert not any(patient.asked for patient in providers.values())  # nothing stands against them
    for _ in range(FAILURES_TO_OPEN):
        a.breaker.failed(now)
    a.breaker.next_try_at = now + 1000.0
    providers["a"].well = False
    await checks.check_once()
    assert providers["a"].asked == 1 and not a.breaker.would_admit(now + 60)
    providers["a"].well = True
    await checks.check_once()
    assert a.breaker.would_admit(asyncio.get_running_loop().time())
    assert providers["b"].asked == 0


async def test_a_silent_server_is_asked_now_and_then(fleet: Fleet, providers: dict[str, Patient]) -> None:
    checks, b = HealthChecks(fleet), named(fleet, "b")
    await checks.check_once()
    b.last_contact_at -= IDLE_SECONDS
    providers["b"].well = False
    await checks.check_once()
    assert providers["b"].asked == 1 and b.is_deprioritised(asyncio.get_running_loop().time())
    await checks.check_once()
    assert providers["b"].asked == 1


async def test_a_server_without_a_health_check_is_never_closed_for_that(
    fleet: Fleet, providers: dict[str, Patient]
) -> None:
    checks, b = HealthChecks(fleet), named(fleet, "b")
    providers["b"].well = False
    for _ in range(2 * FAILURES_TO_OPEN):
        await checks.check_once()
        b.last_contact_at -= IDLE_SECONDS
    now = asyncio.get_running_loop().time()
    assert providers["b"].asked > FAILURES_TO_OPEN and b.is_deprioritised(now)
    assert not b.breaker.open and b.breaker.admit(now)


def servers(*seconds: float, at: float = 100.0) -> list[DeploymentState]:
    made = []
    for number, each in enumerate(seconds):
        fields = {"name": f"s{number}", "base_url": "http://s.invalid/v1", "model": "m"}
        server = DeploymentState(Deployment.model_validate(fields), Patient(), WorkingSet())
        server.first_chunks.extend([(at, each)] * OUTLIER_MIN_SAMPLES)
        made.append(server)
    return made


def ejected(peers: list[DeploymentState]) -> list[str]:
    return [server.name for server in peers if server.breaker.open]


@pytest.mark.parametrize(
    ("seconds", "out"),
    [
        ((1.0, 1.1, 9.0), ["s2"]),
        ((0.01, 0.01, 0.2), []),  # fast enough for anyone
        ((2.0, 3.0, 4.0), []),
        ((9.0,), []),
        ((1.0, 9.0), ["s1"]),
        ((1.0, 1.0, 8.0, 9.0), ["s3", "s2"][::-1]),
    ],
)
def test_whoever_is_far_slower_than_its_peers_is_left_out(seconds: tuple[float, ...], out: list[str]) -> None:
    peers = servers(*seconds)
    eject_outliers(peers, now=101.0)
    assert ejected(peers) == out


def test_an_ejected_one_comes_back_and_old_samples_say_nothing() -> None:
    peers = servers(1.0, 1.0, 9.0)
    eject_outliers(peers, now=100.0 + SAMPLE_MAX_AGE_SECONDS + 1)
    assert ejected(peers) == []
    eject_outliers(peers, now=101.0)
    (out,) = (server for server in peers if server.breaker.open)
    assert not out.breaker.would_admit(101.0) and out.breaker.would_admit(101.0 + EJECTION_SECONDS)


def test_what_was_slow_before_an_ejection_is_not_held_against_it_afterwards() -> None:
    peers = servers(1.0, 1.0, 9.0)
    eject_outliers(peers, now=101.0)
    back = 101.0 + EJECTION_SECONDS
    for peer in peers:
        peer.first_chunks.extend([(105.0, 9.0 if peer.breaker.open else 1.0)] * OUTLIER_MIN_SAMPLES)
    for peer in peers:
        peer.breaker.succeeded(back)
        peer.first_chunks.append((back, 1.0))
    eject_outliers(peers, now=back + 1)
    assert ejected(peers) == []
    slow = peers[2]
    slow.first_chunks.extend([(back + 1, 9.0)] * OUTLIER_MIN_SAMPLES)
    eject_outliers(peers, now=back + 2)
    assert ejected(peers) == [slow.name]


async def test_an_ejected_one_stays_out_although_it_is_well(fleet: Fleet, providers: dict[str, Patient]) -> None:
    """It is slow, and not ill: good health checks, and the slow answers that were under way, change nothing."""
    checks, a, now = HealthChecks(fleet), named(fleet, "a"), asyncio.get_running_loop().time()
    a.breaker.eject(now, EJECTION_SECONDS)
    await checks.check_once()
    assert providers["a"].asked == 1
    a.breaker.succeeded(now + 0.5)
    assert a.breaker.open
    assert not a.breaker.would_admit(now + EJECTION_SECONDS - 1) and a.breaker.would_admit(now + EJECTION_SECONDS)
