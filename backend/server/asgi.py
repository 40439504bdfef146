"""HTTP requests and responses on ASGI, with cancellation of the handler when the client disconnects.

uvicorn does not cancel an ASGI handler when its client disconnects. It discards what the handler sends. So
`HttpExchange.run` runs each handler beside a task that watches `receive()`, from the last byte of the body to the last
byte of the response. `run` cancels the handler when the client disconnects or the server shuts down. On cancellation,
as on every other exit, a handler must abort its requests in the engine.

`Endpoint` is the base class of all POST endpoints. `RequestIdMiddleware` assigns each request its x-request-id.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.server.errors import ApiError, BodyTooLarge, BodyTooSlow, InvalidRequest, ShuttingDown

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BODY_SECONDS = 60.0  # a client that sends its body more slowly gets 408
DEADLINE_HEADER = "x-request-deadline-ms"  # milliseconds from the request's arrival to the client's deadline
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
# An ASGI extension of `http_protocol.py`: a function that writes a piece of a streamed body at once. It returns False,
# and has written nothing, if it cannot: the response has not begun, or the client reads too slowly.
DIRECT_WRITE = "warmpath.direct_write"
SESSION_ID_MAX_CHARACTERS = 128  # longer x-session-id values are truncated, because KV events publish them

logger = logging.getLogger("backend.server")

# Printable ASCII, so that an id is safe in logs, headers and paths.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


class HttpExchange:
    """One HTTP request and its response. Not safe for concurrent use.

    Read the body once. Then call either `respond`, or `stream` several times and `end_stream`. `started` becomes true
    when the status is sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received_ns = time.time_ns()
        self.request_id: str = scope["state"]["request_id"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.session_id = self.headers.get("x-session-id", "")[:SESSION_ID_MAX_CHARACTERS]
        self.started = False
        self.response_headers: dict[str, str] = {}  # in addition to those of `respond` and `stream`
        self._receive = receive
        self._send = send
        self._write_now: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(DIRECT_WRITE)
        self._backlog: list[bytes] = []  # frames that wait for the client: at most the rest of the stream
        self._flushing: asyncio.Task[None] | None = None  # sends the backlog

    def deadline(self) -> float:
        """Returns the request's deadline in seconds since the epoch. Raises InvalidRequest for an invalid header.

        Without the header `x-request-deadline-ms`, the deadline is infinite.
        """
        given = self.headers.get(DEADLINE_HEADER)
        if given is None:
            return math.inf
        if not given.isdecimal() or not 0 < int(given) <= MAX_DEADLINE_MS:
            raise InvalidRequest(
                f"`{DEADLINE_HEADER}` must be milliseconds from 1 to {MAX_DEADLINE_MS}.", param=DEADLINE_HEADER
            )
        return self.received_ns / 1e9 + int(given) / 1000

    async def read_body(self, max_bytes: int = MAX_BODY_BYTES, max_seconds: float = MAX_BODY_SECONDS) -> bytes:
        """Reads the complete request body. Raises BodyTooLarge, BodyTooSlow or ClientDisconnected."""
        try:
            async with asyncio.timeout(max_seconds):
                return await self._read_body(max_bytes)
        except TimeoutError as error:
            raise BodyTooSlow(f"The request body did not arrive within {max_seconds:g} seconds.") from error

    async def _read_body(self, max_bytes: int) -> bytes:
        too_large = BodyTooLarge(f"The request body is larger than {max_bytes} bytes.")
        declared = self.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise too_large
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large
            if not message.get("more_body"):
                return bytes(body)

    async def respond(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends a complete response."""
        fields = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
        await self._start(status, fields)
        await self._send({"type": "http.response.body", "body": body})

    async def stream(self, frames: bytes) -> None:
        """Sends encoded server-sent events. The first call sends status 200, which a later error cannot change."""
        if self._flushing is not None:
            await self._flushing
        if not self.started:
            await self._start_stream()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    def write(self, frames: bytes) -> None:
        """Sends events like `stream`, without waiting for the client. Call `stream` or `end_stream` after the last."""
        if self._flushing is not None or self._write_now is None or not self._write_now(frames):
            self._backlog.append(frames)
            if self._flushing is None:
                self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        while self._backlog:
            frames = b"".join(self._backlog)
            self._backlog.clear()
            if not self.started:
                await self._start_stream()
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        self._flushing = None

    async def end_stream(self) -> None:
        """Ends the response that `stream` began."""
        if self._flushing is not None:
            await self._flushing
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """Sends an error response, or an error event that ends the stream without `[DONE]` if the stream has begun."""
        if not self.started:
            await self.respond(error.body(), status=error.status, headers=error.headers)
            return
        await self.stream(b"data: " + error.body() + b"\n\n")
        await self.end_stream()

    async def run(self, work: Coroutine[Any, Any, None], closing: asyncio.Future[None]) -> None:
        """Runs `work`. Raises ClientDisconnected if the client disconnects and ShuttingDown if `closing` is done.

        When this method returns or raises, `work` has ended. Call this method only after the body was read, because it
        consumes the messages of `receive`.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({task, watch, closing}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if closing.done():
                raise ShuttingDown("The server is shutting down.")
            raise ClientDisconnected
        finally:
            running = {task, watch} | ({self._flushing} if self._flushing else set())
            for each in running:
                each.cancel()
            # Wait until the cancelled work has ended, so that it has aborted its requests in the engine on return.
            await asyncio.wait(running)
            self._flushing = None

    async def _start_stream(self) -> None:
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        fields = {**headers, **self.response_headers}
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Endpoint(ABC):
    """Base class of POST endpoints: an ASGI app that reads a request body and calls `handle` with it.

    A subclass implements `handle`. Responses in progress end when the future `closing` is done.
    """

    closing: asyncio.Future[None]

    @abstractmethod
    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        """Handles one request: responds through `exchange` or raises ApiError.

        The call is cancelled when the client disconnects.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            body = await exchange.read_body()
            await exchange.run(self.handle(exchange, body), self.closing)
        except ApiError as error:
            await exchange.fail(error)
        except ClientDisconnected:
            logger.info("client disconnected: request %s", exchange.request_id)


class RequestIdMiddleware:
    """ASGI middleware for request ids: accepts a valid x-request-id or generates one, and adds it to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)
