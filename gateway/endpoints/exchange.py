"""One HTTP request and its reply: reads the ASGI request and sends the ASGI response.

An `Exchange` reads the body (`request_body`), sends one reply in the client's API format (`Translator`), and watches
for the client's disconnect. Errors are rendered by `rendering`. Most writes take the fast path of our own HTTP server
(`wire`), which costs no coroutine.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from gateway.core.errors import GatewayError, UpstreamRefused
from gateway.core.timers import WaitBound
from gateway.endpoints import wire as bounds
from gateway.endpoints.base import Translator
from gateway.endpoints.rendering import error_frame, status_and_body
from gateway.endpoints.request_body import BodyBudget, RequestBody
from gateway.endpoints.wire import JSON_TYPE, WIRE, ClientGone, Wire, resume
from gateway.response_store import StoringTranslator

CLIENT_CLOSED_STATUS = 499  # of a reply that no client was left to read; stands in telemetry only
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class DisconnectWatch:
    """Cancels the task of a request when its client disconnects, unless other calls still need its answer."""

    def __init__(self, receive: Receive, wire: Wire | None) -> None:
        self.client_gone = False  # it disconnected, or it reads nothing any more
        self._receive = receive
        self._wire = wire
        self._listener: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._wanted: Callable[[], bool] = _unwanted

    def watch(self) -> asyncio.Task[Any]:
        """Cancel the current task, which is returned, when the client disconnects; see `stay_while`."""
        task = self._task = asyncio.current_task()
        assert task is not None
        if self._wire is not None:
            self._wire.when_gone(self._gone)
        else:
            self._listener = asyncio.create_task(self._listen())
        return task

    def unwatch(self) -> None:
        """A disconnect changes nothing from here on. ASGI reports the end of the reply as a disconnect, too."""
        if self._task is None:
            return
        self._task = None
        if self._wire is not None:
            self._wire.when_gone(None)
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None  # it refers to this object

    def stay_while(self, wanted: Callable[[], bool]) -> None:
        """After a disconnect, keep working as long as `wanted()`: others follow this answer."""
        self._wanted = wanted

    def leave_if_gone(self) -> None:
        """Ask `wanted` again, and cancel the task if the client is gone and no other call needs the answer."""
        if self.client_gone and not self._wanted() and self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self.client_gone = True
        self.leave_if_gone()


class Exchange(DisconnectWatch):
    """One request in, one reply out."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        max_body_bytes: int,
        bodies: BodyBudget,
        translator: Translator | None = None,
    ) -> None:
        wire: Wire | None = scope.get("extensions", {}).pop(WIRE, None)  # removed: scope and wire would form a cycle
        super().__init__(receive, wire)
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.status: int | None = None
        self.reply_headers: dict[str, str] = {}  # sent with the reply, whichever it is
        self._body = RequestBody(self.headers, receive, wire, max_bytes=max_body_bytes, budget=bodies)
        self._send = send
        self._translator = translator  # of a wire that is not OpenAI's
        self._frames = None if translator is None else translator.frames  # while frames of an answer leave
        self._storing: StoringTranslator | None = translator if isinstance(translator, StoringTranslator) else None
        self._ended = False
        self._bound: WaitBound | None = None
        self._sending: Awaitable[None] | None = None  # a `send` that has to wait

    async def body(self) -> bytes:
        """The whole body. Raises `BodyTooLarge`, `Overloaded`, `RequestTimeout` or `ClientGone`."""
        try:
            return await self._body.read()
        except ClientGone:
            self.client_gone = True
            raise
        except GatewayError:
            if self._body.unread:
                self.reply_headers["connection"] = "close"
            raise

    async def start(
        self, status: int, content_type: str, headers: Mapping[str, str] = NO_HEADERS, *, length: int | None = None
    ) -> None:
        """Send the head of the reply. `length` is that of the body, if known."""
        self.status = CLIENT_CLOSED_STATUS if self.client_gone else status
        if self.client_gone:
            return
        named = {"content-type": content_type, **self.reply_headers, **headers}
        if self._translator is not None:
            named |= self._translator.headers(named)
        if length is not None:
            named["content-length"] = str(length)
        if self._wire is not None:
            fields = [*map(": ".join, named.items())]
            text = "".join(fields)
            if "\n" in text or "\r" in text or "\0" in text:
                raise ValueError(f"a reply header contains a line break: {named}")
            lines = "\r\n".join(fields).encode("latin-1", "replace") + b"\r\n"
            if self._wire.begin(status, lines, length=length, close=named.get("connection") == "close"):
                return
        message = {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in named.items()],
        }
        if not self._begin_to_send(message):
            await self.drained()

    def put(self, chunk: bytes, *, last: bool = False) -> bool:
        """Send bytes of an answer, translated to the client's wire, without waiting. False: await `drained` next.

        ASGI's `send` is a coroutine that ends at once while the client keeps up. It is started here, and finished in
        `drained` if it has to wait.
        """
        if self._frames is not None and not (chunk := self._frames(chunk, last=last)) and not last:
            return True
        if last:
            self._ended = True
            self.unwatch()
            if self._storing is not None and self._storing.must_store and not self.client_gone:
                self._sending = _later(partial(self._send_end, self._storing, chunk))
                return False
        if self.client_gone or (self._wire is not None and self._wire.write(chunk, last)):
            return True
        return self._begin_to_send({"type": "http.response.body", "body": chunk, "more_body": not last})

    async def send(self, chunk: bytes, *, last: bool = False) -> None:
        """Like `put`, but waits while the client reads nothing, up to `STALL_SECONDS`."""
        if self._sending is not None:
            await self.drained()
        if not self.put(chunk, last=last):
            await self.drained()

    async def _send_end(self, storing: StoringTranslator, chunk: bytes) -> None:
        """Send the last bytes of an answer after it has been stored."""
        chunk += await storing.store_and_finish()
        if not self.client_gone and (self._wire is None or not self._wire.write(chunk, True)):
            await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    def _begin_to_send(self, message: Message) -> bool:
        sending = self._send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return True
        self._sending = resume(sending, waits_for)
        return False

    async def drained(self) -> None:
        """Wait until the client has taken what was sent. Raises `CancelledError` if it stalls."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        bound = self._wait_bound()
        bound.begin()
        try:
            await sending
        except asyncio.CancelledError:
            if not bound.expired:
                raise
            self.client_gone = True
            if not self._wanted():
                raise
            bound.uncancel()
        finally:
            bound.end()

    async def reply(
        self, status: int, content: bytes, content_type: str = JSON_TYPE, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        """Send a whole answer, translated to the client's wire."""
        if self._translator is not None:
            content = self._translator.answer(content)
        if self._storing is not None and self._storing.must_store and not self.client_gone:
            content += await self._storing.store_and_finish()
        await self._reply(status, content, content_type, headers)

    async def _reply(self, status: int, content: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        self._frames = None
        await self.start(status, content_type, headers, length=len(content))
        await self.send(content, last=True)

    async def refuse(self, error: GatewayError) -> None:
        """Send an error: as a status if nothing has been sent yet, else as an event in the stream."""
        self.unwatch()
        if self._ended:
            return
        if self.status is not None:
            self._frames = None
            frame = error_frame(error) if self._translator is None else self._translator.error_frames(error)
            await self.send(frame, last=True)
            return
        self.reply_headers.update(error.headers)
        if not isinstance(error, UpstreamRefused):
            self.reply_headers["x-should-retry"] = "true" if error.retryable else "false"
        refusal = None if self._translator is None else self._translator.error_response(error)
        status, content = refusal or status_and_body(error)
        await self._reply(status, content, JSON_TYPE, NO_HEADERS)

    def close(self) -> None:
        """Stop watching, and release the body's memory. Safe to call twice."""
        self.unwatch()
        if self._storing is not None:
            self._storing.release()
        self._body.release()
        if self._bound is not None:
            self._bound.close()

    def _wait_bound(self) -> WaitBound:
        if self._bound is None:
            self._bound = WaitBound(bounds.STALL_SECONDS)
        return self._bound


def _unwanted() -> bool:
    return False


@types.coroutine
def _later(begin: Callable[[], Coroutine[Any, Any, None]]) -> Generator[Any, Any, None]:
    """A coroutine that is created only when awaited, which may be never."""
    yield from begin().__await__()
