"""Open-loop load: calls start at a given rate, as a Poisson process, whether or not earlier calls have ended."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"retry-after-ms: (\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"connection: close", re.IGNORECASE)
_TEXT = re.compile(rb'"content": *"[^"]')
CALL_SECONDS = 600.0  # a call that takes longer has failed


@dataclass
class Call:
    """One call and its result. Times are in seconds, `began` and `ended` by `time.monotonic`."""

    kind: str
    began: float
    status: int = 0  # 0: the connection broke
    first: float | None = None  # seconds until the first token
    ended: float | None = None
    complete: bool = False
    retry_after_seconds: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began


class Clients:
    """An HTTP client for one port, with keep-alive connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, kind: str, payload: bytes) -> Call:
        """Send one request and read the whole answer. Connection errors and timeouts set status 0."""
        call = Call(kind, time.monotonic())
        try:
            async with asyncio.timeout(CALL_SECONDS):
                reader, writer = await self._connection()
                writer.write(payload)
                head = await reader.readuntil(b"\r\n\r\n")
                await _read(call, head, reader)
            if _CLOSE.search(head):
                writer.close()
            else:
                self._idle.append((reader, writer))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            call.status = 0
        call.ended = time.monotonic()
        return call

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():  # the server may have closed it
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _read(call: Call, head: bytes, reader: asyncio.StreamReader) -> None:
    status = _STATUS.match(head)
    call.status = int(status[1]) if status else 0
    if (retry_after := _RETRY_AFTER.search(head)) is not None:
        call.retry_after_seconds = int(retry_after[1]) / 1000
    if (length := _LENGTH.search(head)) is not None:
        await reader.readexactly(int(length[1]))
        call.complete = call.status == 200
        return
    done = False
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        if call.first is None and _TEXT.search(chunk):
            call.first = time.monotonic() - call.began
        done = done or b"data: [DONE]" in chunk
    await reader.readline()
    call.complete = done


def arrivals(rate: float, seconds: float, chance: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process, in seconds from its start."""
    at = chance.expovariate(rate)
    while at < seconds:
        yield at
        at += chance.expovariate(rate)


async def offered(
    clients: Clients, mix: Sequence[tuple[str, float, Sequence[bytes]]], seconds: float, chance: random.Random
) -> list[asyncio.Task[Call]]:
    """Start calls for so many seconds: each kind at its rate per second, with a random payload of that kind.

    Returns the tasks of all calls. Some are still in flight.
    """
    due = sorted((at, kind, n) for n, (kind, rate, _) in enumerate(mix) for at in arrivals(rate, seconds, chance))
    began, calls = time.monotonic(), []
    for at, kind, n in due:
        if (wait := began + at - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        calls.append(asyncio.create_task(clients.send(kind, chance.choice(mix[n][2]))))
    return calls


def payload(key: str, body: dict[str, Any], **headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = {"host": "127.0.0.1", "authorization": f"Bearer {key}", "content-type": "application/json", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}content-length: {len(content)}\r\n\r\n".encode() + content


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}": round(cuts[p - 1] * 1000, 1) for p in (50, 90, 99)}
