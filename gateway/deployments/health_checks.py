"""How servers are, where calls alone do not tell: one task that asks them, and compares how long they take.

* A server whose breaker is open is asked for its health once a second, so that it is used again as soon as it works.
* One that has not been called for a while is asked now and then; where it does not answer, others go first, so that a
  call need not find out that it is gone.
* One whose first chunks take several times as long as those of its peers is left out for a while, as long as most
  of its peers are not.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Iterable

from gateway.deployments.fleet import DeploymentState, Fleet

CHECK_INTERVAL_SECONDS = 1.0
IDLE_SECONDS = 15.0  # without a call, after which it is asked; and again after as long
CHECKS_AT_ONCE = 16
OUTLIER_FACTOR = 4.0  # times the median of its peers
OUTLIER_MIN_SECONDS = 1.0  # what is faster than this is fast enough
OUTLIER_MIN_SAMPLES = 8
SAMPLE_MAX_AGE_SECONDS = 60.0
EJECTION_SECONDS = 30.0
EJECTED_SHARE_MAX = 0.5  # of the servers that are peers

log = logging.getLogger("warmpath")


class HealthChecks:
    """Run as a task beside the gateway; what it learns goes into the servers' breakers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._check_slots = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            await self.check_once()

    async def check_once(self) -> None:
        """Once around."""
        now = asyncio.get_running_loop().time()
        due: list[DeploymentState] = []
        for deployment in self._fleet:
            if deployment.last_contact_at == 0.0:
                deployment.last_contact_at = now  # it is new: calls may tell
            if deployment.breaker.open or now - deployment.last_contact_at >= IDLE_SECONDS:
                due.append(deployment)
        await asyncio.gather(*(self._check(deployment) for deployment in due))
        for peers in _peers(self._fleet):
            eject_outliers(peers, now)

    async def _check(self, deployment: DeploymentState) -> None:
        async with self._check_slots:
            well = await deployment.provider.healthy()
        now = asyncio.get_running_loop().time()
        deployment.last_contact_at = now
        if well:
            deployment.breaker.allow_probe(now)
        elif not deployment.breaker.open:
            # Calls decide: a server may answer them well and have no such endpoint.
            deployment.breaker.deprioritise(now, IDLE_SECONDS + CHECK_INTERVAL_SECONDS)


def _peers(fleet: Iterable[DeploymentState]) -> list[list[DeploymentState]]:
    """Servers of the same model, which may be compared."""
    by_model: dict[str, list[DeploymentState]] = {}
    for deployment in fleet:
        by_model.setdefault(deployment.config.model, []).append(deployment)
    return list(by_model.values())


def eject_outliers(peers: list[DeploymentState], now: float) -> None:
    """Leave out whoever is far slower than the others, up to a share of them."""
    seconds = {
        deployment.name: statistics.median(recent)
        for deployment in peers
        if not deployment.breaker.open and len(recent := _recent(deployment, now)) >= OUTLIER_MIN_SAMPLES
    }
    may_go = int(EJECTED_SHARE_MAX * len(peers)) - sum(deployment.breaker.open for deployment in peers)
    for deployment in sorted(peers, key=lambda s: -seconds.get(s.name, 0.0)):
        others = [median for name, median in seconds.items() if name != deployment.name]
        own = seconds.get(deployment.name)
        if may_go <= 0 or own is None or not others:
            return
        if own < OUTLIER_MIN_SECONDS or own < OUTLIER_FACTOR * statistics.median(others):
            return
        log.warning(
            "%s takes %.1f s to its first chunk, its peers %.1f s", deployment.name, own, statistics.median(others)
        )
        deployment.breaker.eject(now, EJECTION_SECONDS)
        deployment.failures.breaker_changed(True, now)
        deployment.outlier_samples_since = now + EJECTION_SECONDS  # not by the slow answers that are still under way
        del seconds[deployment.name]
        may_go -= 1


def _recent(deployment: DeploymentState, now: float) -> list[float]:
    since = max(deployment.outlier_samples_since, now - SAMPLE_MAX_AGE_SECONDS)
    return [seconds for at, seconds in deployment.first_chunks if at >= since]
