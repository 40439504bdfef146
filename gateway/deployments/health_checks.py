"""Background task that sends health checks to deployments, and ejects outliers.

* A deployment whose circuit breaker is open is checked once a second, so that it is used again as soon as it works.
* A deployment without recent calls is checked from time to time. If the check fails, other deployments go first, so
  that a call need not find out that this one is down.
* A deployment whose first chunks take several times as long as those of its peers is ejected for a while, as long as
  at least half of the peers remain. It must also be slower at the same work: where calls are routed by prefix, one
  deployment may get the long prompts, and others those that are cached.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections.abc import Iterable

from gateway.deployments.fleet import Fleet
from gateway.deployments.state import DeploymentState

CHECK_INTERVAL_SECONDS = 1.0
IDLE_SECONDS = 15.0  # without a call or a check, after which a deployment is checked
CHECKS_AT_ONCE = 16
OUTLIER_FACTOR = 4.0  # times the median of its peers' times to the first chunk
OUTLIER_MIN_SECONDS = 1.0  # a deployment that is faster than this is never ejected
OUTLIER_MIN_SAMPLES = 8
SAMPLE_MAX_AGE_SECONDS = 60.0
EJECTION_SECONDS = 30.0
EJECTED_SHARE_MAX = 0.5  # of the deployments of one model

log = logging.getLogger("warmpath")


class HealthChecks:
    """Runs the checks as a task, and applies the results to the deployments' circuit breakers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._check_slots = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def run(self) -> None:
        """Check once per `CHECK_INTERVAL_SECONDS`, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            await self.check_once()

    async def check_once(self) -> None:
        """Check all deployments that are due, then eject outliers."""
        now = asyncio.get_running_loop().time()
        due: list[DeploymentState] = []
        for deployment in self._fleet:
            if deployment.last_contact_at == 0.0:
                deployment.last_contact_at = now  # a new deployment: calls may come before a check is due
            if deployment.breaker.open or now - deployment.last_contact_at >= IDLE_SECONDS:
                due.append(deployment)
        await asyncio.gather(*(self._check(deployment) for deployment in due))
        for peers in _peers(self._fleet):
            eject_outliers(peers, now)

    async def _check(self, deployment: DeploymentState) -> None:
        async with self._check_slots:
            is_healthy = await deployment.provider.healthy()
        now = asyncio.get_running_loop().time()
        deployment.last_contact_at = now
        if is_healthy:
            deployment.breaker.allow_probe(now)
            deployment.evidence.accepted_connection()
            return
        deployment.evidence.refused_connection(now)
        if not deployment.breaker.open:
            # Calls decide: a deployment may work well and have no health endpoint.
            deployment.breaker.deprioritise(now, IDLE_SECONDS + CHECK_INTERVAL_SECONDS)


def _peers(fleet: Iterable[DeploymentState]) -> list[list[DeploymentState]]:
    """The deployments by upstream model. Those of one model are peers: they can be compared."""
    by_model: dict[str, list[DeploymentState]] = {}
    for deployment in fleet:
        by_model.setdefault(deployment.config.model, []).append(deployment)
    return list(by_model.values())


def eject_outliers(peers: list[DeploymentState], now: float) -> None:
    """Eject each deployment that is far slower than its peers, up to `EJECTED_SHARE_MAX` of them."""
    seconds = {
        deployment.name: statistics.median(recent)
        for deployment in peers
        if not deployment.breaker.open and len(recent := _recent(deployment, now)) >= OUTLIER_MIN_SAMPLES
    }
    may_eject = int(EJECTED_SHARE_MAX * len(peers)) - sum(deployment.breaker.open for deployment in peers)
    for deployment in sorted(peers, key=lambda deployment: -seconds.get(deployment.name, 0.0)):
        others = [median for name, median in seconds.items() if name != deployment.name]
        own = seconds.get(deployment.name)
        if may_eject <= 0 or own is None or not others:
            return
        if own < OUTLIER_MIN_SECONDS or own < OUTLIER_FACTOR * statistics.median(others):
            return  # the slowest one is no outlier, so no other one is
        if _slowness(deployment, peers, now - SAMPLE_MAX_AGE_SECONDS) < OUTLIER_FACTOR:
            continue
        log.warning(
            "%s: ejected for %g s: its median time to the first chunk is %.1f s, its peers' %.1f s",
            deployment.name,
            EJECTION_SECONDS,
            own,
            statistics.median(others),
        )
        deployment.breaker.eject(now, EJECTION_SECONDS)
        deployment.failures.last_reason = f"{own:.1f} s to the first chunk, far more than its peers"
        deployment.failures.breaker_changed(True, now)
        # Slow responses that are still in flight must not count against it afterwards.
        deployment.outlier_samples_since = now + EJECTION_SECONDS
        del seconds[deployment.name]
        may_eject -= 1


def _slowness(deployment: DeploymentState, peers: Iterable[DeploymentState], since: float) -> float:
    """How many times as long as its peers it takes for the same prompts; infinite if that was not measured `since`."""
    speed = deployment.estimate.speed
    if speed.measured_at < since:
        return math.inf
    factors = [speed.slowness(peer.estimate.speed) for peer in peers if peer is not deployment]
    known = [factor for factor in factors if factor is not None]
    return statistics.median(known) if known else math.inf


def _recent(deployment: DeploymentState, now: float) -> list[float]:
    since = max(deployment.outlier_samples_since, now - SAMPLE_MAX_AGE_SECONDS)
    return [seconds for at, seconds in deployment.first_chunks if at >= since]
