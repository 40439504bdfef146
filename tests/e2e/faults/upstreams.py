"""Upstreams that misbehave by scenario, on real sockets, in a thread of their own.

A scenario gives each of its servers a behaviour: a coroutine that answers one request. All servers of all scenarios
listen at the same time, so that one gateway serves them all, and no scenario sees the breakers of another.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from tests.gateway.providers.scripted_server import (
    STREAM_END,
    STREAM_HEAD,
    ReceivedRequest,
    ScriptedServer,
    chunked,
    json_response,
    reset,
)

TOKENS = 60
SILENCE_SECONDS = 20.0  # longer than any test waits
PROMPT_TOKENS = 10
NO_TLS: Mapping[str, ssl.SSLContext] = MappingProxyType({})

Behaviour = Callable[["Request"], Awaitable[None]]


class Request:
    """One request at one upstream. `number` counts from 0."""

    def __init__(self, received: ReceivedRequest, writer: asyncio.StreamWriter, number: int, name: str) -> None:
        self.content = received.body
        self.headers = received.headers
        self.body: dict[str, Any] = {} if received.body.startswith(b"--") else json.loads(received.body or b"{}")
        self.path = received.head.split(" ")[1]
        self.number = number
        self.name = name
        self.piece_bytes = 0  # size of the pieces that are sent; 0: as they are written
        self._writer = writer

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    async def write(self, data: bytes) -> None:
        size = self.piece_bytes or len(data)
        for start in range(0, len(data), size):
            self._writer.write(data[start : start + size])
            await self._writer.drain()

    async def head(self) -> None:
        await self.write(STREAM_HEAD)
        await self.frame({"delta": {"role": "assistant", "content": ""}, "index": 0, "finish_reason": None})

    async def frame(self, choice: Mapping[str, Any] | None, **fields: Any) -> None:
        choices = [] if choice is None else [choice]
        event = {"id": f"chatcmpl-{self.name}", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        await self.write(chunked(b"data: " + json.dumps({**event, "choices": choices, **fields}).encode() + b"\n\n"))

    async def tokens(self, first: int, end: int) -> None:
        for token in range(first, end):
            await self.frame({"delta": {"content": f"{token} "}, "index": 0, "finish_reason": None})

    async def finish(self, reason: str = "stop", tokens: int = TOKENS) -> None:
        await self.frame({"delta": {}, "index": 0, "finish_reason": reason})
        await self.frame(None, usage=usage(tokens))
        await self.write(chunked(b"data: [DONE]\n\n") + STREAM_END)

    async def whole(self, tokens: int = TOKENS, reason: str = "stop") -> None:
        """Send the right answer."""
        if self.streams:
            await self.head()
            await self.tokens(0, tokens)
            await self.finish(reason, tokens)
            return
        message = {"role": "assistant", "content": "".join(f"{token} " for token in range(tokens))}
        answer = {
            "id": f"chatcmpl-{self.name}", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage(tokens),
        }  # fmt: skip
        await self.write(json_response(json.dumps(answer).encode()))

    async def refuse(self, status: str, *headers: str, code: str = "error") -> None:
        error = {"error": {"message": f"no: {status}", "type": "server_error", "param": None, "code": code}}
        await self.write(json_response(json.dumps(error).encode(), status, *headers))

    def reset(self) -> None:
        reset(self._writer)

    async def stay_silent(self) -> None:
        await asyncio.sleep(SILENCE_SECONDS)


class HeldStreams:
    """A behaviour that sends the first token of a stream, and the others when the test calls `release`.

    So a stream cannot end before the test lets it, however fast or slow the machine is.
    """

    def __init__(self) -> None:
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    async def __call__(self, request: Request) -> None:
        await request.head()
        await request.tokens(0, 1)
        while not self._released.is_set():  # the test runs in another thread
            await asyncio.sleep(0.01)
        await request.tokens(1, TOKENS)
        await request.finish()


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


class Upstreams:
    """The upstreams by name, and the requests that each received."""

    def __init__(self, replies_to_get: Mapping[str, bytes]) -> None:
        self._replies_to_get = replies_to_get
        self.ports: dict[str, int] = {}
        self.requests: dict[str, list[Request]] = {}

    def request_count(self, name: str) -> int:
        """How many requests it received, without health checks."""
        return len(self.requests[name])

    async def listen(self, name: str, behaviour: Behaviour, tls: ssl.SSLContext | None) -> ScriptedServer:
        requests = self.requests[name] = []

        async def answer(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
            if received.head.startswith("GET "):
                writer.write(self._replies_to_get.get(name) or json_response(b'{"object": "list", "data": []}'))
                return
            request = Request(received, writer, len(requests), name)
            requests.append(request)
            await behaviour(request)

        server = await ScriptedServer(answer, tls).__aenter__()
        self.ports[name] = server.port
        return server


@contextmanager
def listening(
    behaviours: Mapping[str, Behaviour],
    tls: Mapping[str, ssl.SSLContext] = NO_TLS,
    *,
    replies_to_get: Mapping[str, bytes] | None = None,
) -> Iterator[Upstreams]:
    """Run all upstreams until the block ends. Those that `tls` names speak TLS.

    They answer GET requests with an empty list, or with `replies_to_get`.
    """
    upstreams, ready, stop = Upstreams(replies_to_get or {}), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def live() -> None:
        loops.append(asyncio.get_running_loop())
        servers = [await upstreams.listen(name, behaviour, tls.get(name)) for name, behaviour in behaviours.items()]
        ready.set()
        await stop.wait()
        for server in servers:
            await server.__aexit__(None, None, None)

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="upstreams")
    thread.start()
    assert ready.wait(30)
    try:
        yield upstreams
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)
