"""Every hour, what the engines have counted is noted beside the ledger, and the difference to what was billed is shown.

`warmpath usage reconcile` compares the notes with the ledger itself. The metric is about this gateway's own receipts
since the note before: where several gateways share a server, the sum of what each has billed is what counts. Of the
workers of one machine a single one takes the engine's counts into its metric, so that their sum is the drift.
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


class _Noted(NamedTuple):
    deployment: DeploymentState
    counted: TokenCounters  # by the engine
    billed: TokenCounters


class DriftMonitor:
    """Run as a task beside the gateway. `drift` is by deployment and kind of token, of the last span between two notes:
    the engine's count less what this gateway has billed. One that does not `lead` leaves the engine's count, and the
    notes, to another one.
    """

    def __init__(
        self, deployments: Iterable[DeploymentState], folder: Path, *, every_seconds: float, leads: bool = True
    ) -> None:
        self._leads = leads
        self._deployments = deployments
        self._folder = folder
        self._every_seconds = every_seconds
        self._noted: dict[str, _Noted] = {}
        self.drift: dict[tuple[str, ...], float] = {}

    async def run(self) -> None:
        while True:
            await self.record()
            await asyncio.sleep(self._every_seconds - time.time() % self._every_seconds)  # on the hour

    async def record(self) -> None:
        noted = await read_counters(self._deployments)
        self.drift = {}
        for name, now in noted.items():
            before = self._noted.get(name)
            if before is None or before.deployment is not now.deployment or min(now.counted.since(before.counted)) < 0:
                continue
            engine = now.counted.since(before.counted) if self._leads else TokenCounters(0, 0)
            ledger = now.billed.since(before.billed)
            self.drift[name, "input"] = engine.input - ledger.input
            self.drift[name, "output"] = engine.output - engine.unwanted - ledger.output
        self._noted = noted
        if not self._leads:
            return
        try:
            append_samples(self._folder, samples_of(noted))
        except OSError as error:
            log.warning("what the engines counted can not be noted in %s: %s", self._folder, error.strerror)


async def read_counters(deployments: Iterable[DeploymentState]) -> dict[str, _Noted]:
    """By deployment, of those whose server tells. Servers are asked at the same time."""
    asked = list(deployments)
    billed = [TokenCounters(deployment.input_billed, deployment.output_billed) for deployment in asked]
    told = await asyncio.gather(*(deployment.provider.token_counters() for deployment in asked))
    return {
        deployment.name: _Noted(deployment, counted, before)
        for deployment, counted, before in zip(asked, told, billed, strict=True)
        if counted is not None
    }


def samples_of(noted: dict[str, _Noted]) -> list[CounterSample]:
    at = rfc3339(time.time_ns())
    return [CounterSample(at, name, one.deployment.config.model, *one.counted) for name, one in noted.items()]
