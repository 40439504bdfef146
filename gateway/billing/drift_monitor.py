"""Samples the engines' token counters every hour, and reports how far they drift from what this gateway has billed.

The samples are written beside the ledger, where `warmpath usage reconcile` compares them with the ledger itself. The
metric only covers this gateway's own receipts since the previous sample. If several gateways share a deployment, the
drift is the engine's count less the sum of what all of them have billed. Among the workers of one gateway, only the
leader includes the engine's count, so that the sum over the workers is the drift.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gateway.billing.ledger.engine_counters import CounterSample, append_samples
from gateway.core.times import rfc3339
from gateway.deployments.fleet import DeploymentState
from gateway.types import TokenCounters

log = logging.getLogger("warmpath")


class _Sample(NamedTuple):
    """One deployment's tokens at one moment, as its engine counted them and as this gateway billed them."""

    deployment: DeploymentState
    counted: TokenCounters
    billed: TokenCounters


class DriftMonitor:
    """Samples the counters periodically. `run` it as a task.

    `drift` has the tokens by deployment and kind (`input`, `output`): the engine's count less what this gateway has
    billed, between the last two samples. A monitor that does not `lead` leaves the engine's count, and the samples on
    disk, to another worker's.
    """

    def __init__(
        self, deployments: Iterable[DeploymentState], folder: Path, *, every_seconds: float, leads: bool = True
    ) -> None:
        self._leads = leads
        self._deployments = deployments
        self._folder = folder
        self._every_seconds = every_seconds
        self._samples: dict[str, _Sample] = {}
        self.drift: dict[tuple[str, ...], float] = {}

    async def run(self) -> None:
        """Sample now, and then on each full period of the clock (on the hour), forever."""
        while True:
            await self.sample()
            await asyncio.sleep(self._every_seconds - time.time() % self._every_seconds)  # on the hour

    async def sample(self) -> None:
        """Read the counters, update `drift`, and append the samples on disk."""
        samples = await read_counters(self._deployments)
        self.drift = {}
        for name, now in samples.items():
            before = self._samples.get(name)
            # Counters that decrease, or another deployment of the same name, leave nothing to compare with.
            if before is None or before.deployment is not now.deployment or min(now.counted.since(before.counted)) < 0:
                continue
            engine = now.counted.since(before.counted) if self._leads else TokenCounters(0, 0)
            ledger = now.billed.since(before.billed)
            self.drift[name, "input"] = engine.input - ledger.input
            self.drift[name, "output"] = engine.output - engine.unwanted - ledger.output
        self._samples = samples
        if not self._leads:
            return
        try:
            append_samples(self._folder, samples_of(samples))
        except OSError as error:
            log.warning("cannot write the engines' token counters to %s: %s", self._folder, error.strerror)


async def read_counters(deployments: Iterable[DeploymentState]) -> dict[str, _Sample]:
    """The counters of each deployment whose engine reports them, by name. Engines are queried concurrently."""
    queried = list(deployments)
    billed = [TokenCounters(deployment.input_billed, deployment.output_billed) for deployment in queried]
    counters = await asyncio.gather(*(deployment.provider.token_counters() for deployment in queried))
    return {
        deployment.name: _Sample(deployment, counted, before)
        for deployment, counted, before in zip(queried, counters, billed, strict=True)
        if counted is not None
    }


def samples_of(samples: dict[str, _Sample]) -> list[CounterSample]:
    """The engines' counts as rows for the file, at the present time."""
    at = rfc3339(time.time_ns())
    return [CounterSample(at, name, one.deployment.config.model, *one.counted) for name, one in samples.items()]
