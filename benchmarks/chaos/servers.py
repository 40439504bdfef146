"""The scripted servers, and the relay that reads what the killed engine counts.

Each scripted server has its own way to misbehave, on real sockets. `good` never does: it is the healthy deployment of
the models of half of them. The models of the other half fall back to the bundled engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.e2e.faults.schedules import random_behaviour
from tests.e2e.faults.test_published_scenarios import no_done
from tests.e2e.faults.test_scenarios import broken, busy, cut, error_with_200, malformed, reset_connection, unavailable
from tests.e2e.faults.upstreams import Behaviour, Request
from tests.e2e.test_hostile_usage import ABSURD
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response

STALL_SECONDS = 15.0
LATE_SECONDS = 3.0
WORDS = 6
PIECE_BYTES_MAX = 65536

_REQUEST_ID = re.compile(rb"^x-request-id: ?(\S+)", re.IGNORECASE | re.MULTILINE)
_USAGE = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


async def good(request: Request) -> None:
    await request.whole(WORDS)


async def not_utf8(request: Request) -> None:
    content = b'{"choices":[{"index":0,"delta":{"content":"\xff\xfe"},"message":{"content":"\xff\xfe"}}]}'
    if request.streams:
        await request.write(STREAM_HEAD + chunked(b"data: " + content + b"\n\n"))
    else:
        await request.write(json_response(content))


async def stall(request: Request) -> None:
    await request.head()
    await request.tokens(0, 2)
    await asyncio.sleep(STALL_SECONDS)
    request.reset()


async def late(request: Request) -> None:
    await asyncio.sleep(LATE_SECONDS)
    await request.whole(WORDS)


async def no_model(request: Request) -> None:
    await request.refuse("404 Not Found", code="model_not_found")


async def no_key(request: Request) -> None:
    await request.refuse("401 Unauthorized", code="invalid_api_key")


async def garbage(request: Request) -> None:
    await request.write(bytes(range(256)))
    request.reset()


async def endless_head(request: Request) -> None:
    """A reply whose head never ends."""
    await request.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(5000):
        await request.write(f"x-{number}: {'y' * 100}\r\n".encode())
    request.reset()


async def lonely_role(request: Request) -> None:
    """The head and the role of an answer, and then nothing."""
    await request.head()
    request.reset()


def absurd_usage(seed: str) -> Behaviour:
    """Whole answers, and usage that is impossible."""
    chance = random.Random(seed)

    async def behave(request: Request) -> None:
        usage = json.loads(chance.choice([text for text in ABSURD if "1e999" not in text]))
        if request.streams:
            await request.head()
            await request.tokens(0, WORDS)
            await request.frame({"delta": {}, "index": 0, "finish_reason": "stop"})
            await request.frame(None, usage=usage)
            await request.write(chunked(b"data: [DONE]\n\n") + STREAM_END)
            return
        message = {"role": "assistant", "content": "two words"}
        answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        await request.write(json_response(json.dumps({**answer, "usage": usage}).encode()))

    return behave


def behaviours(seed: int) -> dict[str, Behaviour]:
    """The scripted servers by name."""
    return {
        "good": good, "absurd-usage": absurd_usage(f"usage {seed}"), "not-utf8": not_utf8, "cut": cut, "stall": stall,
        "malformed": malformed, "error-in-200": error_with_200, "no-model": no_model, "no-key": no_key,
        "no-done": no_done, "late": late, "500": broken, "503": unavailable, "429": busy, "reset": reset_connection,
        "garbage": garbage, "endless-head": endless_head, "lonely-role": lonely_role,
        "random": random_behaviour(f"random {seed}"),
    }  # fmt: skip


class Tap:
    """A relay before the engine that is killed, which reads the engine's counts from its answers.

    A killed engine takes its counters with it. What it said before is in `counted`, by request id.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.counted: dict[str, tuple[int, int]] = {}  # prompt and output tokens

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        exchange = _Exchange(self.counted)
        both = [
            asyncio.create_task(_pass_on(reader, engine_writer, exchange.sent)),
            asyncio.create_task(_pass_on(engine_reader, writer, exchange.received)),
        ]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for each in both:
            each.cancel()
        await asyncio.wait(both)
        for end in (writer, engine_writer):
            end.transport.abort()


class _Exchange:
    """Reads request ids and usage on one connection, which carries one request at a time."""

    def __init__(self, counted: dict[str, tuple[int, int]]) -> None:
        self._counted = counted
        self._request_id = ""
        self._tail = b""  # the end of the answer so far, in which usage may begin

    def sent(self, data: bytes) -> None:
        if data.startswith((b"POST ", b"GET ")):
            found = _REQUEST_ID.search(data)
            self._request_id, self._tail = found[1].decode() if found and data.startswith(b"POST ") else "", b""

    def received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-4096:]
        found = _USAGE.findall(self._tail)
        if found and self._request_id:
            with contextlib.suppress(ValueError):
                usage: dict[str, Any] = json.loads(found[-1])
                self._counted[self._request_id] = usage["prompt_tokens"], usage.get("completion_tokens", 0)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read: Any) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES_MAX):
            read(data)
            writer.write(data)
            await writer.drain()
