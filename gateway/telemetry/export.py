"""Span exporter: sends encoded spans to a collector with OTLP over HTTP, in batches, from a task on the event loop.

`SpanQueue` holds at most `SPANS_WAITING_MAX` spans. The task sends a batch every few seconds, or as soon as the queue
has a full batch. If the collector does not answer or is overloaded, a batch is retried once and then dropped. Dropped
spans are counted; an unreachable collector has no other effect.
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

from gateway.core.supervision import SupervisedTask, Supervisor
from gateway.providers.transport import HTTPTransport, header_lines

SPANS_WAITING_MAX = 8192  # further spans are dropped and counted
SPANS_PER_EXPORT_MAX = 512
EXPORT_INTERVAL_SECONDS = 2.0
EXPORT_TIMEOUT_SECONDS = 5.0  # per batch, the retry included
RETRY_SECONDS = 0.5
FLUSH_TIMEOUT_SECONDS = 5.0  # at shutdown, for the whole queue
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})  # from OTLP's specification
UNAVAILABLE = "it is unreachable or overloaded"  # the error after which a batch is retried once

log = logging.getLogger(__name__)


class SpanQueue:
    """Bounded queue of encoded spans, and the task that sends them.

    `envelope` builds the request body from encoded spans.
    """

    def __init__(
        self,
        otlp_endpoint: str,
        envelope: Callable[[Sequence[bytes]], bytes],
        *,
        headers: Iterable[tuple[str, str]] = (),
        interval_seconds: float = EXPORT_INTERVAL_SECONDS,
        supervisor: Supervisor | None = None,
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
        self._batch_ready = asyncio.Event()
        self._supervisor = supervisor or Supervisor()
        self._task: SupervisedTask | None = None
        self._transport: HTTPTransport | None = None
        self.dropped = 0  # spans that the full queue rejected or that a failed export lost

    def start(self) -> None:
        """Start the export task. Spans that were put before are dropped."""
        self._transport = HTTPTransport(connect_timeout_seconds=EXPORT_TIMEOUT_SECONDS)
        self._pool = self._transport.pool(self._url)
        self._task = self._supervisor.start("span export", self._export_periodically)

    def put(self, spans: Sequence[bytes]) -> None:
        """Queue all spans of a request, or drop all of them if the queue is full."""
        if self._task is None or len(self._waiting) + len(spans) > SPANS_WAITING_MAX:
            self.dropped += len(spans)
            return
        self._waiting.extend(spans)
        if len(self._waiting) >= SPANS_PER_EXPORT_MAX:
            self._batch_ready.set()

    async def close(self) -> None:
        """Send the queued spans within FLUSH_TIMEOUT_SECONDS and drop the rest. Safe to call twice."""
        task, self._task = self._task, None
        if task is None or self._transport is None:
            return
        await task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
                while self._waiting:
                    await self._export(self._transport)
        self.dropped += len(self._waiting)
        self._waiting.clear()
        await self._transport.aclose()

    async def _export_periodically(self) -> None:
        assert self._transport is not None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_seconds):
                    await self._batch_ready.wait()
            self._batch_ready.clear()
            while self._waiting:
                await self._export(self._transport)

    async def _export(self, transport: HTTPTransport) -> None:
        """Send one batch. It leaves the queue once it is sent or dropped."""
        batch = list(islice(self._waiting, SPANS_PER_EXPORT_MAX))
        try:
            body = self._envelope(batch)
            async with asyncio.timeout(EXPORT_TIMEOUT_SECONDS):
                error = await self._post(transport, body)
                if error == UNAVAILABLE:
                    await asyncio.sleep(RETRY_SECONDS)
                    error = await self._post(transport, body)
        except TimeoutError:
            error = "timeout"
        except Exception:
            self._take_out(batch, sent=False)  # otherwise the next run would fail with the same spans
            raise
        self._take_out(batch, sent=not error)
        if error:
            log.warning("%d spans dropped: the collector at %s: %s", len(batch), self._url.host, error)

    def _take_out(self, batch: list[bytes], *, sent: bool) -> None:
        """Take a batch out of the queue. Not before its export has ended: spans in flight count as waiting."""
        for _ in batch:
            self._waiting.popleft()
        self.dropped += 0 if sent else len(batch)

    async def _post(self, transport: HTTPTransport, body: bytes) -> str:
        """Send one request. Returns the error, or an empty string."""
        head = self._head + b"content-length: %d\r\n" % len(body)
        try:
            answer = await transport.send(self._pool, head, body)
            try:
                async for _ in answer:
                    pass
            finally:
                await answer.aclose()
        except httpx2.TransportError:
            return UNAVAILABLE
        if answer.status in RETRYABLE_STATUSES:
            return UNAVAILABLE
        return "" if 200 <= answer.status < 300 else f"status {answer.status}"
