"""The gateway's process without sockets: its own HTTP server, all phases, and answers that are fixed bytes.

The gateway is built as `warmpath serve` builds it, on uvloop, with storage in memory, a ledger on disk, limits, a
budget, a price and metrics. Only the sockets are replaced: `MemoryLoop` connects the transport to deployments that
answer with the mock server's bytes, and `Client` writes requests into the server's protocol and checks the answers.
Requests are sent one at a time, so each run does the same work, whatever the machine. `counts.py` counts it.

Between requests, `SECONDS_PER_REQUEST` pass on the event loop's clock, and no time otherwise. So the work of timers,
such as the group commit of the ledger, is part of the figures as often as it would be at this rate. By the real clock,
valgrind would count some fifty times as much of it, and a busy machine still more. For the same reason event ids, which
draw new random bits every 10 ms, are made by this clock.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
import uvloop

from benchmarks.gateway.load import KEY, PROMPT
from benchmarks.gateway.mock_server import JSON_REPLY, STREAM_END, STREAM_HEAD, TOKEN_EVENT, TRACES_REPLY
from gateway.core import ids
from gateway.core.api_keys import hash_key
from gateway.policy.file import PolicyHolder
from gateway.server.app import Gateway
from gateway.server.http_protocol import Connections, JoinedProtocol
from gateway.server.listener import GC_THRESHOLDS, QUIET
from gateway.server.policy_checks import IN_SERVICE
from gateway.settings import Settings

SECONDS_PER_REQUEST = 0.001  # on the loop's clock: the gateway gets a thousand requests a second
TRACEPARENT = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"  # asks for a trace

POLICY = f"""
deployments:
  - name: mock
    provider: vllm
    base_url: http://127.0.0.1:1/v1
    model: mock
    max_concurrency: 256
    price: {{input: 0.10, cached_input: 0.01, output: 0.40}}
models:
  - {{name: mock, deployments: [mock]}}
rules:
  - {{match: {{service_tier: flex}}, class: batch}}
tracing: {{sample: 0%}}
tenants:
  - name: bench
    keys: [{{id: bench, hash: "{hash_key(KEY, "")}"}}]
    limits: {{requests: 100M/1m, tokens: 100G/1m, concurrency: 1000, budget: {{amount: 1000000, per: month}}}}
"""


class MemoryTransport(asyncio.Transport):
    """A connection without a socket: `on_write` gets what the gateway writes."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._closing = False
        self.write = on_write  # type: ignore[assignment, method-assign]

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class SteppedLoop(uvloop.Loop):
    """An event loop whose clock stands still after `stop_clock`, except for `step`."""

    def __init__(self) -> None:
        super().__init__()
        self._now: list[float] = []  # the time if the clock stands still
        self._timers: list[asyncio.TimerHandle] = []  # a heap of those set since then

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if not self._now:
            return super().call_at(when, callback, *args, context=context)
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, timer)
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if not self._now:
            return super().call_later(delay, callback, *args, context=context)
        return self.call_at(self._now[0] + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Called by a timer that is cancelled. It stays in the heap until it is due, and then does nothing."""

    def stop_clock(self) -> None:
        self._now.append(self.time())
        clock: Any = partial(getitem, self._now, 0)  # one call of C, as uvloop's
        self.time = clock  # type: ignore[method-assign]

    def step(self, seconds: float) -> None:
        """Move the clock, and let the timers run that are due."""
        self._now[0] += seconds
        while self._timers and self._timers[0].when() <= self._now[0]:
            self.call_soon(_run, heapq.heappop(self._timers))

    def start_clock(self) -> None:
        """Return to the real clock. Timers that are left run at their times by it."""
        now = self._now.pop()
        del self.time
        for timer in self._timers:
            self.call_later(max(0.0, timer.when() - now), _run, timer)
        self._timers.clear()


def _run(timer: asyncio.TimerHandle) -> None:
    if not timer.cancelled():
        timer._run()


class MemoryLoop(SteppedLoop):
    """An event loop whose outgoing connections lead to a deployment that answers with `reads`.

    The deployment sends the first read when it has the request, and each further one when the client has something of
    the last: so a gateway gets each in a callback of its own, and never lags behind.
    """

    reads: Iterator[bytes]

    async def create_connection(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        protocol = protocol_factory()

        def answer(request: bytes) -> None:
            if request.startswith(b"POST /v1/chat/"):
                self._receiver = protocol.data_received
                self.send_next()
            else:  # an export of traces, or a health check
                self.call_soon(protocol.data_received, TRACES_REPLY)

        transport = MemoryTransport(answer)
        protocol.connection_made(transport)
        return transport, protocol

    def send_next(self) -> None:
        """Let the deployment send its next read, if any."""
        if (read := next(self.reads, None)) is not None:
            self.call_soon(self._receiver, read)


class Client:
    """A client on one connection: sends a request, and waits until its answer is complete."""

    def __init__(self, server: uvicorn.Config, connections: Connections, loop: MemoryLoop) -> None:
        self._loop = loop
        self._end = b""
        self._received: list[bytes] = []
        self._answered: asyncio.Future[None]
        self._protocol = JoinedProtocol(server, connections, {}, loop)
        self._protocol.connection_made(MemoryTransport(self._read))

    def _read(self, data: bytes) -> None:
        self._received.append(data)
        if data.endswith(self._end):
            self._answered.set_result(None)
        else:
            self._loop.send_next()

    async def ask(self, request: bytes, end: bytes) -> bytes:
        """Send a request whose answer ends with `end`. Raises `AssertionError` for another answer."""
        self._end, self._answered = end, self._loop.create_future()
        self._received.clear()
        self._protocol.data_received(request)
        await self._answered
        assert self._received[0].startswith(b"HTTP/1.1 200 "), self._received[0]
        return b"".join(self._received)


class Load:
    """One kind of request, with the reads in which the deployment's answer arrives, and the end of the answer."""

    def __init__(self, reads: tuple[bytes, ...], end: bytes, *, traced: bool = False, **fields: object) -> None:
        body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": PROMPT}], **fields}).encode()
        self.request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{TRACEPARENT if traced else ''}\r\n"
        ).encode() + body
        self.reads = reads
        self.end = end


def json_load(*, traced: bool = False) -> Load:
    return Load((JSON_REPLY,), JSON_REPLY[-32:], max_tokens=64, traced=traced)


def stream_load(reads: int, events_per_read: int = 1) -> Load:
    """A stream whose events, after the first, arrive in `reads` reads."""
    together = (STREAM_HEAD + TOKEN_EVENT, *([TOKEN_EVENT * events_per_read] * reads), b"".join(STREAM_END))
    return Load(together, b"0\r\n\r\n", stream=True, max_tokens=1 + reads * events_per_read)


Ask = Callable[[Load], Awaitable[bytes]]


@asynccontextmanager
async def gateway(loop: MemoryLoop, folder: Path) -> AsyncIterator[Ask]:
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    os.environ["WARMPATH_LOG_LEVEL"] = "warning"
    settings = Settings(
        policy=policy, data_dir=folder / "data", storage="memory://", otlp_endpoint="http://127.0.0.1:1"
    )
    app = Gateway(settings, PolicyHolder(policy, checks=IN_SERVICE))
    config = uvicorn.Config(cast(Any, app), http=JoinedProtocol, lifespan="on", **QUIET)
    config.load()
    stop, started = asyncio.Event(), loop.create_future()

    async def receive() -> Any:
        if started.done():
            await stop.wait()
        return {"type": "lifespan.shutdown" if started.done() else "lifespan.startup"}

    async def send(message: Any) -> None:
        if not started.done():
            started.set_result(message["type"])

    lifespan = asyncio.create_task(app({"type": "lifespan"}, receive, send))
    assert await started == "lifespan.startup.complete"
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    client = Client(config, Connections(), loop)

    async def ask(load: Load) -> bytes:
        loop.step(SECONDS_PER_REQUEST)
        loop.reads = iter(load.reads)
        return await client.ask(load.request, load.end)

    loop.stop_clock()
    stepped = SimpleNamespace(time_ns=lambda: int(loop.time() * 1e9))
    vars(ids)["time"] = stepped  # the ids' module reads no other time
    try:
        yield ask
    finally:
        vars(ids)["time"] = time
        loop.start_clock()
        stop.set()
        await lifespan


def run(work: Callable[[Ask], Coroutine[Any, Any, None]]) -> None:
    """Run `work` with a function that sends one request of a load through a gateway and waits for its answer."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with gateway(loop, Path(folder)) as ask:
                await work(ask)

    loop = MemoryLoop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
