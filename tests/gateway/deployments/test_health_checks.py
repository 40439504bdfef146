"""Health checks and outlier ejection, with providers that report their health."""

from __future__ import annotations

import asyncio

import pytest

from gateway.deployments.circuit_breaker import FAILURES_TO_OPEN
from gateway.deployments.fleet import Fleet
from gateway.deployments.health_checks import (
    EJECTION_SECONDS,
    IDLE_SECONDS,
    OUTLIER_MIN_SAMPLES,
    SAMPLE_MAX_AGE_SECONDS,
    HealthChecks,
    eject_outliers,
)
from gateway.deployments.state import DeploymentState
from gateway.policy import Deployment
from gateway.prefix.working_set import WorkingSet
from gateway.providers.offline import OfflineProvider
from tests.gateway.calls import a_policy


class HealthCheckedProvider(OfflineProvider):
    def __init__(self) -> None:
        self.is_healthy = True
        self.checks = 0

    async def healthy(self) -> bool:
        self.checks += 1
        return self.is_healthy


@pytest.fixture
def providers() -> dict[str, HealthCheckedProvider]:
    return {"a": HealthCheckedProvider(), "b": HealthCheckedProvider(), "c": HealthCheckedProvider()}


@pytest.fixture
def fleet(providers: dict[str, HealthCheckedProvider]) -> Fleet:
    def provider(deployment: Deployment) -> HealthCheckedProvider:
        return providers.setdefault(deployment.name, HealthCheckedProvider())

    fleet = Fleet(provider)
    fleet.apply(a_policy())
    return fleet


def deployment_named(fleet: Fleet, name: str) -> DeploymentState:
    return next(deployment for deployment in fleet if deployment.name == name)


async def test_a_failing_deployment_is_used_again_as_soon_as_it_is_healthy(
    fleet: Fleet, providers: dict[str, HealthCheckedProvider]
) -> None:
    checks, now, a = HealthChecks(fleet), asyncio.get_running_loop().time(), deployment_named(fleet, "a")
    await checks.check_once()
    assert not any(provider.checks for provider in providers.values())  # no breaker is open, and no deployment is idle
    for _ in range(FAILURES_TO_OPEN):
        a.breaker.failed(now)
    a.breaker.next_try_at = now + 1000.0
    providers["a"].is_healthy = False
    await checks.check_once()
    assert providers["a"].checks == 1 and not a.breaker.would_admit(now + 60)
    providers["a"].is_healthy = True
    await checks.check_once()
    assert a.breaker.would_admit(asyncio.get_running_loop().time())
    assert providers["b"].checks == 0


async def test_an_idle_deployment_is_checked_from_time_to_time(
    fleet: Fleet, providers: dict[str, HealthCheckedProvider]
) -> None:
    checks, b = HealthChecks(fleet), deployment_named(fleet, "b")
    await checks.check_once()
    b.last_contact_at -= IDLE_SECONDS
    providers["b"].is_healthy = False
    await checks.check_once()
    assert providers["b"].checks == 1 and b.is_deprioritised(asyncio.get_running_loop().time())
    await checks.check_once()
    assert providers["b"].checks == 1


async def test_a_failing_health_check_alone_never_opens_the_breaker(
    fleet: Fleet, providers: dict[str, HealthCheckedProvider]
) -> None:
    checks, b = HealthChecks(fleet), deployment_named(fleet, "b")
    providers["b"].is_healthy = False
    for _ in range(2 * FAILURES_TO_OPEN):
        await checks.check_once()
        b.last_contact_at -= IDLE_SECONDS
    now = asyncio.get_running_loop().time()
    assert providers["b"].checks > FAILURES_TO_OPEN and b.is_deprioritised(now)
    assert not b.breaker.open and b.breaker.admit(now)


def deployments(*seconds: float, at: float = 100.0) -> list[DeploymentState]:
    made = []
    for number, each in enumerate(seconds):
        fields = {"name": f"s{number}", "base_url": "http://s.invalid/v1", "model": "m"}
        deployment = DeploymentState(Deployment.model_validate(fields), HealthCheckedProvider(), WorkingSet())
        deployment.first_chunks.extend([(at, each)] * OUTLIER_MIN_SAMPLES)
        made.append(deployment)
    return made


def ejected(peers: list[DeploymentState]) -> list[str]:
    return [deployment.name for deployment in peers if deployment.breaker.open]


@pytest.mark.parametrize(
    ("seconds", "out"),
    [
        ((1.0, 1.1, 9.0), ["s2"]),
        ((0.01, 0.01, 0.2), []),  # fast enough
        ((2.0, 3.0, 4.0), []),
        ((9.0,), []),
        ((1.0, 9.0), ["s1"]),
        ((1.0, 1.0, 8.0, 9.0), ["s3", "s2"][::-1]),
    ],
)
def test_outliers_are_ejected(seconds: tuple[float, ...], out: list[str]) -> None:
    peers = deployments(*seconds)
    eject_outliers(peers, now=101.0)
    assert ejected(peers) == out


@pytest.mark.parametrize(
    ("slowdown", "measured_at", "out"),
    [(1.0, 90.0, []), (5.0, 90.0, ["s2"]), (1.0, 100.0 - SAMPLE_MAX_AGE_SECONDS, ["s2"])],
    ids=["as fast", "slow", "fast long ago"],
)
def test_long_prompts_do_not_make_an_outlier(slowdown: float, measured_at: float, out: list[str]) -> None:
    """Where calls are routed by prefix, one deployment may get the long prompts, and others those that are cached."""
    peers = deployments(0.1, 0.1, 9.0)
    for peer in peers:
        peer.estimate.speed.measured_at = measured_at
        tokens = 18_000 if peer is peers[2] else 200
        for _ in range(20):
            peer.estimate.speed.learn(1, tokens, tokens / 2_000 * (slowdown if peer is peers[2] else 1.0))
    eject_outliers(peers, now=101.0)
    assert ejected(peers) == out


def test_an_ejection_ends_and_old_samples_do_not_count() -> None:
    peers = deployments(1.0, 1.0, 9.0)
    eject_outliers(peers, now=100.0 + SAMPLE_MAX_AGE_SECONDS + 1)
    assert ejected(peers) == []
    eject_outliers(peers, now=101.0)
    (out,) = (deployment for deployment in peers if deployment.breaker.open)
    assert not out.breaker.would_admit(101.0) and out.breaker.would_admit(101.0 + EJECTION_SECONDS)


def test_samples_from_before_an_ejection_do_not_count_after_it() -> None:
    peers = deployments(1.0, 1.0, 9.0)
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


async def test_a_health_check_does_not_end_an_ejection(
    fleet: Fleet, providers: dict[str, HealthCheckedProvider]
) -> None:
    """Neither a good health check nor a slow response in flight ends it: the deployment is slow, not down."""
    checks, a, now = HealthChecks(fleet), deployment_named(fleet, "a"), asyncio.get_running_loop().time()
    a.breaker.eject(now, EJECTION_SECONDS)
    await checks.check_once()
    assert providers["a"].checks == 1
    a.breaker.succeeded(now + 0.5)
    assert a.breaker.open
    assert not a.breaker.would_admit(now + EJECTION_SECONDS - 1) and a.breaker.would_admit(now + EJECTION_SECONDS)
