"""Drift monitor: samples the engines' token counters every hour, and compares them with the tokens that were billed.

The samples are written beside the ledger. `warmpath usage reconcile` compares the samples with the ledger itself. The
drift metric only covers this gateway's own receipts since the previous sample. If several gateways share a deployment,
its drift is the engine's count less the sum of what all gateways have billed. Among the workers of one gateway, only
the leader includes the engine's count, so the drift is the sum over the workers.
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
from gateway.deployments.state import DeploymentState
from gateway.providers import COUNTING_PROVIDERS
from gateway.types import TokenCounters

log = logging.getLogger("warmpath")


class _Sample(NamedTuple):
    """One deployment's token counts at one moment: those of its engine, and those that this gateway has billed."""

    deployment: DeploymentState
    counted: TokenCounters
    billed: TokenCounters


class DriftMonitor:
    """Samples the engines' token counters periodically. Start `run` as a task.

    `drift` has a number of tokens by deployment and kind (`input`, `output`). The number is the engine's count less
    what this gateway has billed, between the last two samples. `counted` has the engine's count itself. If several
    workers run, one of them has `leads` set. Only that worker includes the engine's count and writes samples to disk.
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
        self.counted: dict[tuple[str, ...], float] = {}
        self.unread: list[str] = []  # deployments whose counters the last sample lacks

    async def run(self) -> None:
        """Take a sample now, and then at each full period of the clock, such as each full hour. Runs forever."""
        while True:
            await self.sample()
            await asyncio.sleep(self._every_seconds - time.time() % self._every_seconds)  # on the hour

    async def sample(self) -> None:
        """Read the engines' counters, update `drift`, and append the samples to the file on disk."""
        samples, self.unread = await read_counters(self._deployments)
        if self.unread and self._leads:
            log.warning("the token counters of %s could not be read; its drift is unknown", ", ".join(self.unread))
        self.drift, self.counted = {}, {}
        for name, now in samples.items():
            before = self._samples.get(name)
            # If the counters have decreased, or another deployment has taken the name, the samples are not comparable.
            if before is None or before.deployment is not now.deployment or min(now.counted.since(before.counted)) < 0:
                continue
            engine = now.counted.since(before.counted) if self._leads else TokenCounters(0, 0)
            ledger = now.billed.since(before.billed)
            counted = {"input": engine.input, "output": engine.output - engine.unwanted}
            self.drift[name, "input"] = counted["input"] - ledger.input
            self.drift[name, "output"] = counted["output"] - ledger.output
            if self._leads:
                self.counted.update({(name, kind): tokens for kind, tokens in counted.items()})
        self._samples = samples
        if not self._leads:
            return
        try:
            append_samples(self._folder, samples_of(samples))
        except OSError as error:
            log.warning("cannot write the engines' token counters to %s: %s", self._folder, error.strerror)


async def read_counters(deployments: Iterable[DeploymentState]) -> tuple[dict[str, _Sample], list[str]]:
    """Read the token counters of each deployment whose engine has any. Queries the engines concurrently.

    Returns the samples by the deployment's name, and the names of those that have counters but did not answer.
    """
    queried = list(deployments)
    billed = [TokenCounters(deployment.input_billed, deployment.output_billed) for deployment in queried]
    counters = await asyncio.gather(*(deployment.provider.token_counters() for deployment in queried))
    found, unread = dict[str, _Sample](), list[str]()
    for deployment, counted, before in zip(queried, counters, billed, strict=True):
        if counted is not None:
            found[deployment.name] = _Sample(deployment, counted, before)
        elif deployment.config.provider in COUNTING_PROVIDERS:
            unread.append(deployment.name)
    return found, unread


def samples_of(samples: dict[str, _Sample]) -> list[CounterSample]:
    """Return the engines' counts as rows for the file of samples, with the present time."""
    at = rfc3339(time.time_ns())
    return [CounterSample(at, name, one.deployment.config.model, *one.counted) for name, one in samples.items()]
