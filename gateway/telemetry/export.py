"""Encoded spans on their way to a collector: OTLP over HTTP, in batches, by a task of the event loop.

A collector that is away costs spans and nothing else: what waits is bounded, what is lost is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from urllib.parse import urlsplit

import httpx2

from gateway.providers.transport import HTTPTransport, header_lines

SPANS_WAITING_MAX = 8192  # more are dropped, and counted
SPANS_PER_EXPORT_MAX = 512
EXPORT_INTERVAL_SECONDS = 2.0
EXPORT_TIMEOUT_SECONDS = 5.0  # of one batch, its second try included
RETRY_SECONDS = 0.5
FLUSH_TIMEOUT_SECONDS = 5.0  # at shutdown, for all that waits
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})  # as OTLP's specification has it
RETRY = "it is away, or too busy"  # the fault after which a batch is sent once more

log = logging.getLogger(__name__)


class SpanQueue:
    """Spans on their way out, at most SPANS_WAITING_MAX. `envelope` makes the body of a request of encoded spans."""

    def __init__(
        self,
        otlp_endpoint: str,
        envelope: Callable[[Sequence[bytes]], bytes],
        *,
        headers: Iterable[tuple[str, str]] = (),
        interval_seconds: float = EXPORT_INTERVAL_SECONDS,
    ) -> None:
        base = otlp_endpoint.rstrip("/")
        url = urlsplit(base if base.endswith("/v1/traces") else f"{base}/v1/traces")
        own = [("host", url.netloc.rpartition("@")[2]), ("content-type", "application/x-protobuf"), *headers]
        lines = header_lines([(name.encode("latin-1"), value.encode("latin-1")) for name, value in own])
        self._head = b"POST %b HTTP/1.1\r\n%b" % (url.path.encode("ascii"), lines)
        self._url = httpx2.URL(url.geturl())
        self._envelope = envelope
        self._interval_seconds = interval_seconds
        self._waiting: deque[bytes] = deque()
        self._full = asyncio.Event()  # enough for a batch
        self._task: asyncio.Task[None] | None = None
        self._transport: HTTPTransport | None = None
        self.dropped = 0  # spans that never arrived: refused by a full queue, or lost in a failed export

    def start(self) -> None:
        self._transport = HTTPTransport(connect_timeout_seconds=EXPORT_TIMEOUT_SECONDS)
        self._task = asyncio.create_task(self._export_now_and_then(), name="span export")

    def put(self, spans: Sequence[bytes]) -> None:
        """All of a request's spans or none."""
        if self._task is None or len(self._waiting) + len(spans) > SPANS_WAITING_MAX:
            self.dropped += len(spans)
            return
        self._waiting.extend(spans)
        if len(self._waiting) >= SPANS_PER_EXPORT_MAX:
            self._full.set()

    async def close(self) -> None:
        """Send what waits, within FLUSH_TIMEOUT_SECONDS; the rest is lost. Safe to call twice."""
        task, self._task = self._task, None
        if task is None or self._transport is None:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
                while self._waiting:
                    await self._export(self._transport)
        self.dropped += len(self._waiting)
        self._waiting.clear()
        await self._transport.aclose()

    async def _export_now_and_then(self) -> None:
        assert self._transport is not None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_seconds):
                    await self._full.wait()
            self._full.clear()
            while self._waiting:
                await self._export(self._transport)

    async def _export(self, transport: HTTPTransport) -> None:
        """One batch; it leaves the queue when its fate is known."""
        batch = list(islice(self._waiting, SPANS_PER_EXPORT_MAX))
        body = self._envelope(batch)
        try:
            async with asyncio.timeout(EXPORT_TIMEOUT_SECONDS):
                fault = await self._post(transport, body)
                if fault == RETRY:
                    await asyncio.sleep(RETRY_SECONDS)
                    fault = await self._post(transport, body)
        except TimeoutError:
            fault = "no answer in time"
        for _ in batch:
            self._waiting.popleft()
        if fault:
            self.dropped += len(batch)
            log.warning("%d spans are lost: the collector at %s: %s", len(batch), self._url.host, fault)

    async def _post(self, transport: HTTPTransport, body: bytes) -> str:
        """What went wrong; empty where nothing did."""
        head = self._head + b"content-length: %d\r\n" % len(body)
        try:
            answer = await transport.send(transport.pool(self._url), head, body)
            try:
                async for _ in answer:
                    pass
            finally:
                await answer.aclose()
        except httpx2.TransportError:
            return RETRY
        if answer.status in RETRYABLE_STATUSES:
            return RETRY
        return "" if 200 <= answer.status < 300 else f"status {answer.status}"
