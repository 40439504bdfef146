"""Collects what engines report about themselves, if the policy says so: KV events and load metrics.

KV events keep the deployment's cache model exact (`gateway/prefix/events/`); metrics set the load and the cache
capacity in its `Estimate`. Each source runs as a task. `EngineReports.run` starts and stops these tasks as the policy
changes.

Serving does not depend on any of this. A deployment that reports nothing is estimated from its responses alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.core.timers import time_bound
from gateway.deployments.fleet import Fleet
from gateway.deployments.state import DeploymentState
from gateway.policy import Deployment, Secret
from gateway.prefix.engine_load import read_engine_load
from gateway.prefix.events.base import EventCounts, EventSource
from gateway.prefix.events.block_index import BlockIndex
from gateway.prefix.events.trtllm import PATH as TENSORRT_PATH
from gateway.prefix.events.trtllm import TensorRTEventSource
from gateway.prefix.in_flight import ReportedLoad
from gateway.providers.transport import PROXY_EXTENSION, TLS_EXTENSION, HTTPTransport, Proxy

SYNC_SECONDS = 1.0  # between two comparisons with the policy
METRICS_SECONDS = 2.0  # between two reads of a deployment's metrics
RESPONSE_SECONDS = 2.0  # time limit of one HTTP request
RESPONSE_MAX_BYTES = 8 * 1024 * 1024
ROOM_WITH_EVENTS = 2.0  # times the capacity: if events report evictions, the model's own bound only limits memory

ResolveSecret = Callable[[Secret], str]


class EngineReporter:
    """The tasks that read one deployment's reports, under one configuration. Start it once, then stop it."""

    def __init__(
        self,
        deployment: DeploymentState,
        transport: HTTPTransport,
        resolve_secret: ResolveSecret,
        supervisor: Supervisor,
    ) -> None:
        self.config = deployment.config
        self.counts = EventCounts()
        self._deployment = deployment
        self._transport = transport
        self._resolve_secret = resolve_secret
        self._supervisor = supervisor
        self._tasks: list[SupervisedTask] = []

    def start(self) -> None:
        """Start a task for each source that the configuration names."""
        config, name = self.config, self._deployment.name
        if config.kv_events is not None:
            self._deployment.blocks = BlockIndex(self._deployment.cache)
            self._tasks.append(self._supervisor.start(f"KV events of {name}", self._follow_events))
        if config.metrics:
            self._tasks.append(self._supervisor.start(f"metrics of {name}", self._poll))

    async def stop(self) -> None:
        """Cancel the tasks and wait for them. Detaches the block index from the deployment."""
        self._deployment.blocks = None
        for task in self._tasks:
            await task.cancel()

    async def _follow_events(self) -> None:
        blocks = self._deployment.blocks
        assert blocks is not None
        if len(blocks):  # an earlier run has failed, perhaps in the middle of a batch
            blocks.events_lost()
        await self._make_source(self.config, blocks).run()

    def _make_source(self, config: Deployment, blocks: BlockIndex) -> EventSource:
        assert config.kv_events is not None
        if not config.kv_events.startswith("http"):
            zmq = importlib.import_module("gateway.prefix.events.zmq")  # late: libzmq takes 4 MiB
            source: EventSource = zmq.ZmqEventSource(config.kv_events, config.kv_events_replay, blocks, self.counts)
            return source
        url = httpx2.URL(config.kv_events.rstrip("/") + TENSORRT_PATH)
        return TensorRTEventSource(lambda: self._fetch("POST", url), blocks, self.counts)

    async def _poll(self) -> None:
        url = self._metrics_url()
        while True:
            metrics = await self._fetch("GET", url)
            if metrics is not None:
                self._apply_load(metrics.decode("utf-8", "replace"))
            await asyncio.sleep(METRICS_SECONDS)

    def _apply_load(self, text: str) -> None:
        reported = read_engine_load(text)
        if reported is None:
            return
        estimate, now = self._deployment.estimate, asyncio.get_running_loop().time()
        estimate.load = ReportedLoad(now, reported.running, reported.waiting, reported.kv_usage)
        if reported.capacity_tokens is not None:
            blocks, room = self._deployment.blocks, 1.0
            if blocks is not None:
                blocks.set_capacity(reported.capacity_tokens)
                room = 1.0 if blocks.in_doubt else ROOM_WITH_EVENTS
            estimate.set_capacity(reported.capacity_tokens, room)

    def _metrics_url(self) -> httpx2.URL:
        if isinstance(self.config.metrics, str):
            return httpx2.URL(self.config.metrics)
        return httpx2.URL(self.config.base_url.rstrip("/").removesuffix("/v1") + "/metrics")

    async def _fetch(self, method: str, url: httpx2.URL) -> bytes | None:
        """The body of a successful response; None after an error, a time-out, or a body that is too long.

        The deployment's API key and client certificate are sent to its own origin only.
        """
        headers, extensions = {"accept-encoding": "identity"}, dict[str, Any]()
        ours = httpx2.URL(self.config.base_url)
        if (url.scheme, url.netloc) == (ours.scheme, ours.netloc):
            extensions[TLS_EXTENSION] = self.config.tls
            if (proxy := self.config.proxy) is not None:
                login = None if proxy.login is None else self._resolve_secret(proxy.login)
                extensions[PROXY_EXTENSION] = Proxy.of(proxy.url, login)
            if self.config.api_key is not None:
                headers["authorization"] = f"Bearer {self._resolve_secret(self.config.api_key)}"
        request = httpx2.Request(method, url, headers=headers, extensions=extensions)
        with contextlib.suppress(httpx2.TransportError, TimeoutError):
            async with time_bound(RESPONSE_SECONDS):
                response = await self._transport.handle_async_request(request)
                try:
                    body = bytearray()
                    async for part in response.aiter_raw():
                        body += part
                        if len(body) > RESPONSE_MAX_BYTES:
                            return None
                finally:
                    await response.aclose()
                return bytes(body) if response.is_success else None
        return None


class EngineReports:
    """The reporters of all deployments. Run it as a task."""

    def __init__(
        self,
        fleet: Fleet,
        transport: HTTPTransport,
        resolve_secret: ResolveSecret,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._supervisor = supervisor or Supervisor()
        self._fleet = fleet
        self._transport = transport
        self._resolve_secret = resolve_secret
        self._reporters: dict[DeploymentState, EngineReporter] = {}

    def __iter__(self) -> Iterator[tuple[DeploymentState, EngineReporter]]:
        return iter(self._reporters.items())

    async def run(self) -> None:
        """Follow the policy until cancelled; then stop all reporters."""
        try:
            while True:
                await self.sync_with_policy()
                await asyncio.sleep(SYNC_SECONDS)
        finally:
            for reporter in self._reporters.values():
                await reporter.stop()
            self._reporters.clear()

    async def sync_with_policy(self) -> None:
        """Stop the reporters whose deployment was changed or removed, and start those of new ones."""
        present = set(self._fleet)
        for deployment, reporter in list(self._reporters.items()):
            if deployment not in present or deployment.config != reporter.config:
                del self._reporters[deployment]
                await reporter.stop()
        for deployment in present - self._reporters.keys():
            reporter = self._reporters[deployment] = EngineReporter(
                deployment, self._transport, self._resolve_secret, self._supervisor
            )
            reporter.start()
