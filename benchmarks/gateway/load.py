"""Load generator of the gateway benchmarks: a fixed number of requests over keep-alive connections, and their times.

    python -m benchmarks.gateway.load PORT --requests 2000 --concurrency 16
    python -m benchmarks.gateway.load PORT --requests 256 --concurrency 64 --chunks 64 --pace 50

Every answer is checked: its status, and for a stream the number of its events and its `[DONE]`. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast

import httptools
import uvloop

KEY = "wp-bench-0123456789abcdef"
PROMPT = "What does a prefix cache keep, and for how long? " * 16  # makes a request of about 1 KB


@dataclass
class Tally:
    """Counts the requests that are still to be sent, and collects the results of the others."""

    to_send: int
    failed: list[str] = field(default_factory=list)
    ttft_seconds: list[float] = field(default_factory=list)
    total_seconds: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """Sends one request after the other, until none is left."""

    def __init__(self, payload: bytes, events: int, tally: Tally, ended: asyncio.Future[None]) -> None:
        self._payload = payload
        self._events = events  # of a complete stream; 0 if a JSON body is expected
        self._tally = tally
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        if self._tally.to_send == 0:
            self._transport.close()
            return
        self._tally.to_send -= 1
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._sent = time.perf_counter()
        self._transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self._body:
            self._tally.ttft_seconds.append(time.perf_counter() - self._sent)
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._tally.total_seconds.append(time.perf_counter() - self._sent)
        body = b"".join(self._body)
        if (wrong := self._error_of(self._parser.get_status_code(), body)) is not None:
            self._tally.failed.append(wrong)
        self._next()

    def _error_of(self, status: int, body: bytes) -> str | None:
        if status != 200:
            return f"status {status}: {body[:200]!r}"
        if not self._events:
            return None if b'"usage"' in body else f"no answer: {body[:200]!r}"
        events = body.count(b"data: ")
        if not body.endswith(b"data: [DONE]\n\n"):
            return f"no [DONE] after {events} events"
        return None if events >= self._events else f"{events} of {self._events} events"

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or self._tally.to_send:
            self._tally.failed.append(f"connection lost: {error}")
        if not self._ended.done():
            self._ended.set_result(None)


def payload(options: argparse.Namespace) -> bytes:
    body = json.dumps(
        {
            "model": options.model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": options.chunks or 64,
            "user": f"paced-{options.pace}" if options.pace else "unpaced",
            "stream": options.chunks > 0,
        }
    ).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {options.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{''.join(f'{line}{chr(13)}{chr(10)}' for line in options.header)}\r\n"
    ).encode() + body


async def run(options: argparse.Namespace) -> dict[str, object]:
    tally = Tally(options.requests)
    request = payload(options)
    events = options.chunks + 2 if options.chunks else 0  # with the finish chunk and [DONE]
    started = time.perf_counter()
    connections = min(options.concurrency, options.requests)
    await asyncio.gather(*(one_connection(options.port, request, events, tally) for _ in range(connections)))
    seconds = time.perf_counter() - started
    return {
        "requests": len(tally.total_seconds),
        "failed": tally.failed[:3],
        "requests_per_second": len(tally.total_seconds) / seconds,
        "ttft_ms": percentiles(tally.ttft_seconds),
        "total_ms": percentiles(tally.total_seconds),
    }


async def one_connection(port: int, request: bytes, events: int, tally: Tally) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    await loop.create_connection(lambda: Connection(request, events, tally, ended), "127.0.0.1", port)
    await ended


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [float("nan")]
    return {f"p{p}": ordered[min(len(ordered) * p // 100, len(ordered) - 1)] * 1000 for p in (50, 99)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=0, help="content chunks per stream; 0: JSON answers")
    parser.add_argument("--pace", type=int, default=0, help="chunks per second; 0: unpaced")
    parser.add_argument("--model", default="mock")
    parser.add_argument("--key", default="none")
    parser.add_argument("--header", action="append", default=[], help="a further header line")
    print(json.dumps(uvloop.run(run(parser.parse_args()))))
