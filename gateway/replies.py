"""The bytes that leave, and the one place that renders an error.

An `Exchange` is one request and its reply on the ASGI border. It reads the body once and bounded, sends one reply,
and listens for the client's leaving: a bare ASGI callable is not told of it in any other way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from gateway.errors import BodyTooLarge, GatewayError, UpstreamRefused
from gateway.timers import WaitBound

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
DISCARD_MAX_BYTES = 64 * 2**20  # of a body over the cap, read and dropped so that the client can read its refusal
BODY_MAX_SECONDS = 60.0  # for the whole request body to arrive
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
WRITE_STALL_SECONDS = 60.0  # a client that takes nothing for so long is taken for gone


class ClientGone(Exception):
    """The client left before its request was read."""


class Exchange:
    """One request in, one reply out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, max_body_bytes: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.client_gone = False
        self.status: int | None = None
        self.reply_headers: dict[str, str] = {}  # sent with whatever reply is sent
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._write: WaitBound | None = None
        self._watch: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._wanted: Callable[[], bool] = lambda: False

    async def body(self) -> bytes:
        """The whole body. Raises `BodyTooLarge`, `ClientGone`, or TimeoutError where it does not arrive."""
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            await self._discard()
            raise self._too_large()
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return self._checked(message.get("body", b""))
        async with asyncio.timeout(BODY_MAX_SECONDS):
            return await self._rest_of_body(message)

    async def _rest_of_body(self, message: Any) -> bytes:
        body = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                await self._discard()
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)
            message = await self._receive()

    def _checked(self, body: bytes) -> bytes:
        if len(body) > self._max_body_bytes:
            raise self._too_large()
        return body

    async def _discard(self) -> None:
        """Read on without keeping, up to a bound: a client that is still writing does not read its refusal."""
        dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_MAX_SECONDS):
                while dropped < DISCARD_MAX_BYTES:
                    message = await self._receive()
                    dropped += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body has more than {self._max_body_bytes} bytes")

    def watch(self) -> None:
        """From now on the present task is cancelled when the client leaves; but see `stay_while`."""
        self._task = asyncio.current_task()
        self._write = WaitBound(WRITE_STALL_SECONDS)
        self._watch = asyncio.create_task(self._listen())

    def stay_while(self, wanted: Callable[[], bool]) -> None:
        """Work on for others when the client leaves, as long as `wanted`; `leave_if_gone` looks again."""
        self._wanted = wanted

    def leave_if_gone(self) -> None:
        if self.client_gone and not self._wanted() and self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        self.leave_if_gone()

    async def start(self, status: int, content_type: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.status = status
        lines = {"content-type": content_type, **self.reply_headers, **headers}
        await self._send({
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in lines.items()],
        })  # fmt: skip

    async def send(self, chunk: bytes, *, last: bool = False) -> None:
        """Send bytes; waits while the client takes nothing, up to `WRITE_STALL_SECONDS`."""
        if self.client_gone:
            return
        if self._write is not None:
            self._write.begin()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not last})
        if self._write is not None:
            self._write.end()

    async def reply(
        self, status: int, content: bytes, content_type: str = JSON_TYPE, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        """A whole reply at once."""
        await self.start(status, content_type, {**headers, "content-length": str(len(content))})
        await self.send(content, last=True)

    async def refuse(self, error: GatewayError) -> None:
        """Tell the client of an error: as a status while nothing has been sent, in the stream afterwards."""
        if self.status is not None:
            await self.send(error_frame(error), last=True)
        elif isinstance(error, UpstreamRefused):
            await self.reply(error.upstream_status, error.content, error.content_type)
        else:
            self.reply_headers.update(error.headers)
            self.reply_headers["x-should-retry"] = "true" if error.retryable else "false"
            await self.reply(error.status, render_error(error))

    def left(self) -> bool:
        """Whether a cancellation means that the client left, or takes nothing any more."""
        return self.client_gone or (self._write is not None and self._write.expired)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self._watch is not None:
            self._watch.cancel()
        if self._write is not None:
            self._write.close()


def render_error(error: GatewayError) -> bytes:
    return orjson.dumps({"error": error.body()})


def error_frame(error: GatewayError) -> bytes:
    """An error after the first byte: one event, and no `[DONE]` behind it."""
    return b"data: " + render_error(error) + b"\n\n"
