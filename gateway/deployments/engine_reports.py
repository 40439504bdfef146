"""What servers tell of themselves, where the policy says that they do: KV events into their cache models, load into
their estimates. One task for each source, kept in step with the policy by one that looks every second.

Nothing here is needed to serve: a server that tells nothing, or stops telling, is judged by its replies alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import httpx2

from gateway.deployments.fleet import DeploymentState, Fleet
from gateway.policy import Deployment, EnvSecret
from gateway.prefix.engine_load import read_engine_load
from gateway.prefix.estimate import ReportedLoad
from gateway.prefix.events.base import EventCounts, EventSource
from gateway.prefix.events.block_index import BlockIndex
from gateway.prefix.events.trtllm import PATH as TENSORRT_PATH
from gateway.prefix.events.trtllm import TensorRTEventSource
from gateway.prefix.events.zmq import ZmqEventSource
from gateway.providers.transport import HTTPTransport

SYNC_SECONDS = 1.0
METRICS_SECONDS = 2.0  # between two looks at a server's metrics
ANSWER_SECONDS = 2.0
ANSWER_MAX_BYTES = 8 * 1024 * 1024
EVENTS_ROOM = 2.0  # where evictions are told, the model's own bound is only there to hold its memory

log = logging.getLogger("warmpath")

ResolveSecret = Callable[[EnvSecret], str]


class EngineReporter:
    """One server's sources, from the policy that named them to one that names others."""

    def __init__(self, deployment: DeploymentState, transport: HTTPTransport, resolve_secret: ResolveSecret) -> None:
        self.deployment = deployment.config
        self.counts = EventCounts()
        self._deployment = deployment
        self._transport = transport
        self._resolve_secret = resolve_secret
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        deployment, name = self.deployment, self._deployment.name
        if deployment.kv_events is not None:
            self._deployment.blocks = BlockIndex(self._deployment.cache)
            source = self._source(deployment, self._deployment.blocks)
            self._tasks.append(asyncio.create_task(source.run(), name=f"KV events of {name}"))
        if deployment.metrics:
            self._tasks.append(asyncio.create_task(self._poll(), name=f"metrics of {name}"))
        for task in self._tasks:
            task.add_done_callback(_tell_why_it_ended)

    async def end(self) -> None:
        self._deployment.blocks = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _source(self, deployment: Deployment, blocks: BlockIndex) -> EventSource:
        assert deployment.kv_events is not None
        if not deployment.kv_events.startswith("http"):
            return ZmqEventSource(deployment.kv_events, deployment.kv_events_replay, blocks, self.counts)
        url = httpx2.URL(deployment.kv_events.rstrip("/") + TENSORRT_PATH)
        return TensorRTEventSource(lambda: self._ask("POST", url), blocks, self.counts)

    async def _poll(self) -> None:
        url = self._metrics_url()
        while True:
            answer = await self._ask("GET", url)
            if answer is not None:
                self._take_load(answer.decode("utf-8", "replace"))
            await asyncio.sleep(METRICS_SECONDS)

    def _take_load(self, text: str) -> None:
        reported = read_engine_load(text)
        if reported is None:
            return
        estimate, now = self._deployment.estimate, asyncio.get_running_loop().time()
        estimate.load = ReportedLoad(now, reported.running, reported.waiting, reported.kv_usage)
        if reported.capacity_tokens is not None:
            blocks, room = self._deployment.blocks, 1.0
            if blocks is not None:
                blocks.set_capacity(reported.capacity_tokens)
                room = 1.0 if blocks.in_doubt else EVENTS_ROOM
            estimate.set_capacity(reported.capacity_tokens, room)

    def _metrics_url(self) -> httpx2.URL:
        if isinstance(self.deployment.metrics, str):
            return httpx2.URL(self.deployment.metrics)
        return httpx2.URL(self.deployment.base_url.rstrip("/").removesuffix("/v1") + "/metrics")

    async def _ask(self, method: str, url: httpx2.URL) -> bytes | None:
        """The body of a good answer, within the bounds, or None. The key goes to the server's own address only."""
        headers = {"accept-encoding": "identity"}
        ours = httpx2.URL(self.deployment.base_url)
        if self.deployment.api_key is not None and (url.scheme, url.netloc) == (ours.scheme, ours.netloc):
            headers["authorization"] = f"Bearer {self._resolve_secret(self.deployment.api_key)}"
        request = httpx2.Request(method, url, headers=headers)
        with contextlib.suppress(httpx2.TransportError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                response = await self._transport.handle_async_request(request)
                try:
                    body = bytearray()
                    async for part in response.aiter_raw():
                        body += part
                        if len(body) > ANSWER_MAX_BYTES:
                            return None
                finally:
                    await response.aclose()
                return bytes(body) if response.is_success else None
        return None


class EngineReports:
    """All servers'. Run as a task beside the gateway."""

    def __init__(self, fleet: Fleet, transport: HTTPTransport, resolve_secret: ResolveSecret) -> None:
        self._fleet = fleet
        self._transport = transport
        self._resolve_secret = resolve_secret
        self._reporting: dict[DeploymentState, EngineReporter] = {}

    def __iter__(self) -> Iterator[tuple[DeploymentState, EngineReporter]]:
        return iter(self._reporting.items())

    async def run(self) -> None:
        try:
            while True:
                await self.sync_with_policy()
                await asyncio.sleep(SYNC_SECONDS)
        finally:
            for reporting in self._reporting.values():
                await reporting.end()
            self._reporting.clear()

    async def sync_with_policy(self) -> None:
        """Begin what the policy names, and end what it names no more."""
        present = set(self._fleet)
        for deployment, reporting in list(self._reporting.items()):
            if deployment not in present or deployment.config != reporting.deployment:
                del self._reporting[deployment]
                await reporting.end()
        for deployment in present - self._reporting.keys():
            reporting = self._reporting[deployment] = EngineReporter(deployment, self._transport, self._resolve_secret)
            reporting.begin()


def _tell_why_it_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s are followed no more", task.get_name(), exc_info=error)
