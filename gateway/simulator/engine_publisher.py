"""What a simulated engine publishes about itself: KV events and metrics, as `gateway.deployments.engine_reports` reads.

The events of one step arrive together, `EVENTS_SECONDS` after it. Metrics are read every `METRICS_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.deployments.engine_reports import METRICS_SECONDS, ROOM_WITH_EVENTS
from gateway.deployments.state import DeploymentState
from gateway.prefix.events.base import BlocksRemoved, BlocksStored
from gateway.prefix.events.block_index import BlockIndex
from gateway.prefix.in_flight import ReportedLoad
from gateway.simulator.simulated_engine import SimulatedEngine

EVENTS_SECONDS = 0.002


class EnginePublisher:
    """Publishes one engine's events and metrics to each gateway. It is the listener of the engine's cache."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._events: list[BlocksStored | BlocksRemoved] = []
        self._indexes: list[BlockIndex] = []
        self.is_attached = False

    def attach(self, deployments: Sequence[DeploymentState], engine: SimulatedEngine) -> None:
        """The engine is this deployment of each gateway. Call it once, before the engine gets a request."""
        self._deployments, self._engine = deployments, engine
        self.is_attached = True
        for deployment in deployments:
            deployment.blocks = BlockIndex(deployment.cache)
            self._indexes.append(deployment.blocks)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def stored(self, hashes: Sequence[int], parent: int | None, session: str) -> None:
        self._events.append(BlocksStored(tuple(hashes), parent, self._block_tokens, session))

    def removed(self, hashes: Sequence[int]) -> None:
        self._events.append(BlocksRemoved(tuple(hashes)))

    def publish(self, now: float) -> None:
        """Deliver all events so far, in order."""
        events, self._events = self._events, []
        for index in self._indexes:
            for event in events:
                if isinstance(event, BlocksStored):
                    index.stored(event)
                else:
                    index.removed(event)

    def report_metrics(self, now: float) -> None:
        """Deliver the engine's load and the size of its cache."""
        engine = self._engine
        capacity_tokens = engine.cache.capacity * self._block_tokens
        load = ReportedLoad(now, engine.running, len(engine.waiting), engine.used_share)
        for deployment, index in zip(self._deployments, self._indexes, strict=True):
            deployment.estimate.load = load
            index.set_capacity(capacity_tokens)
            deployment.estimate.set_capacity(capacity_tokens, ROOM_WITH_EVENTS)


__all__ = ["EVENTS_SECONDS", "METRICS_SECONDS", "EnginePublisher"]
