"""One HTTP request and its reply: reads the ASGI request and sends the ASGI response.

An `Exchange` reads the body (`request_body`) and sends one reply. A `Translator` converts the reply to the client's API
format. ASGI reports a disconnect only to a task that awaits `receive`, so a `DisconnectWatch` awaits it. `rendering`
encodes errors. Most writes use the interface in `wire` that the gateway's own HTTP server offers, because a write then
needs no coroutine.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from gateway.core.errors import GatewayError, UpstreamRefused
from gateway.core.first_step import resume
from gateway.core.timers import WaitBound
from gateway.endpoints import wire as bounds
from gateway.endpoints.base import ReplyTranslator, Translator
from gateway.endpoints.rendering import error_frame, status_and_body
from gateway.endpoints.request_body import BodyBudget, RequestBody
from gateway.endpoints.wire import JSON_TYPE, WIRE, ClientGone, Wire
from gateway.providers.text_events import DirectText, Received
from gateway.response_store import StoringTranslator

CLIENT_CLOSED_STATUS = 499  # status of a reply whose client has disconnected; appears only in telemetry
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Recorder(Protocol):
    """Records a reply as the client receives it."""

    def begin(self, status: int, content_type: str, headers: Mapping[str, str], length: int | None) -> None:
        """The reply begins. `headers` are those of the answer, without those of this request alone."""

    def write(self, chunk: bytes) -> None: ...


class DisconnectWatch:
    """Cancels the task of a request when its client disconnects, unless other calls still need the answer."""

    def __init__(self, receive: Receive, wire: Wire | None) -> None:
        self.client_gone = False  # the client disconnected, or stopped reading
        self._receive = receive
        self._wire = wire
        self._listener: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._wanted: Callable[[], bool] = _unwanted

    def watch(self) -> asyncio.Task[Any]:
        """Cancel the current task when the client disconnects, unless `stay_while` says otherwise. Returns the task."""
        task = self._task = asyncio.current_task()
        assert task is not None
        if self._wire is not None:
            self._wire.when_gone(self._gone)
        else:
            self._listener = asyncio.create_task(self._listen())
        return task

    def unwatch(self) -> None:
        """Stop watching for a disconnect. Needed at the end of the reply, which ASGI also reports as a disconnect."""
        if self._task is None:
            return
        self._task = None
        if self._wire is not None:
            self._wire.when_gone(None)
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None  # the listener refers to this object, which would form a cycle

    def stay_while(self, wanted: Callable[[], bool]) -> None:
        """Continue after a disconnect while `wanted()` is true, because other calls still need this answer.

        If it is called again, the task continues while any of the given functions returns true.
        """
        before = self._wanted
        self._wanted = wanted if before is _unwanted else lambda: before() or wanted()

    def leave_if_gone(self) -> None:
        """Cancel the task if the client has disconnected and `wanted()` is now false."""
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
    """Reads one request and sends one reply or error."""

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
        self.reply_headers: dict[str, str] = {}  # sent with the reply, including an error reply
        self.recorder: Recorder | None = None
        self._kept_body: bytes | None = None  # read, but needed once more
        self._body = RequestBody(self.headers, receive, wire, max_bytes=max_body_bytes, budget=bodies)
        self._send = send
        self._translator: ReplyTranslator | None = translator  # None if the client's API format is OpenAI's
        self._frames = None if translator is None else translator.frames  # set while frames of an answer are sent
        self._storing: StoringTranslator | None = None
        if translator is not None and isinstance(translator, StoringTranslator):
            self._storing = translator
        self._ended = False
        self._bound: WaitBound | None = None
        self._sending: Awaitable[None] | None = None  # a `send` that has to wait

    async def body(self, *, again: bool = False) -> bytes:
        """Return the complete body. Raises `BodyTooLarge`, `Overloaded`, `RequestTimeout` or `ClientGone`.

        May be called once more after a call with `again`.
        """
        body, self._kept_body = self._kept_body, None
        try:
            if body is None and (body := self._body.arrived()) is None:
                body = await self._body.read()
        except ClientGone:
            self.client_gone = True
            raise
        if again:
            self._kept_body = body
        return body

    def check_announced_body(self) -> None:
        """Raise `BodyTooLarge` if the request announces a body that is too long."""
        self._body.check_announced()

    async def start(
        self, status: int, content_type: str, headers: Mapping[str, str] = NO_HEADERS, *, length: int | None = None
    ) -> None:
        """Send the status and headers of the reply. `length` is the length of the body in bytes, if known."""
        self.status = CLIENT_CLOSED_STATUS if self.client_gone else status
        if self.recorder is not None:
            self.recorder.begin(status, content_type, headers, length)
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
        """Translate bytes of an answer to the client's API format, and send them without waiting.

        Returns False if the caller must await `drained` before the next `put`. ASGI's `send` is a coroutine that
        finishes at once if the client reads fast enough. `put` starts that coroutine, and `drained` awaits it if it has
        to wait.
        """
        if self._frames is not None and not (chunk := self._frames(chunk, last=last)) and not last:
            return True
        if last:
            self._ended = True
            self.unwatch()
            if self._storing is not None and self._stores_answer:
                self._sending = _later(partial(self._send_end, self._storing, chunk))
                return False
        if self.recorder is not None:
            self.recorder.write(chunk)
        if self.client_gone or (self._wire is not None and self._wire.write(chunk, last)):
            return True
        return self._begin_to_send({"type": "http.response.body", "body": chunk, "more_body": not last})

    @property
    def unchanged_writer(self) -> Callable[[bytes, bool], bool] | None:
        """`Wire.write`, if the chunks of the answer pass to it as they are. None if they are translated or recorded."""
        wire = self._wire
        return None if wire is None or self._frames is not None or self.recorder is not None else wire.write

    def direct_text(self, received: Received, until: float) -> DirectText | None:
        """A `DirectText` to the client's connection. Only if there is an `unchanged_writer`."""
        found = None if self._wire is None else self._wire.coded_writer()
        return None if found is None else DirectText(received, *found, until)

    async def send(self, chunk: bytes, *, last: bool = False) -> None:
        """Send bytes of an answer like `put`, but wait up to `STALL_SECONDS` if the client is not reading."""
        if self._sending is not None:
            await self.drained()
        if not self.put(chunk, last=last):
            await self.drained()

    async def _send_end(self, storing: StoringTranslator, chunk: bytes) -> None:
        """Send the last bytes of an answer after it has been stored."""
        chunk += await storing.store_and_finish()
        if self.recorder is not None:
            self.recorder.write(chunk)
        if not self.client_gone and (self._wire is None or not self._wire.write(chunk, True)):
            await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    @property
    def _stores_answer(self) -> bool:
        """Whether the answer waits to be stored. It is not if the client is gone and will not get its last bytes."""
        storing = self._storing
        return storing is not None and storing.must_store and (not self.client_gone or self.recorder is not None)

    def _begin_to_send(self, message: Message) -> bool:
        sending = self._send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return True
        self._sending = resume(sending, waits_for)
        return False

    async def drained(self) -> None:
        """Wait until the client has read the bytes that were sent. Raises `CancelledError` if the client stalls."""
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
        """Translate a complete answer to the client's API format, and send it."""
        if self._translator is not None:
            content = self._translator.answer(content)
        if self._storing is not None and self._stores_answer:
            content += await self._storing.store_and_finish()
        await self._reply(status, content, content_type, headers)

    def store_by(self, translator: ReplyTranslator, storing: StoringTranslator) -> None:
        """Pass the reply through an object that stores it, given twice. Only for replies that are not translated."""
        self._translator, self._storing = translator, storing
        self._frames = translator.frames

    def answer_in_clients_format(self) -> None:
        """The answer's bytes have the client's API format already, and pass without translation."""
        if self._translator is not None:
            self._translator.pass_answer()

    async def replay(self, status: int, content_type: str, headers: Mapping[str, str], *, length: int | None) -> None:
        """Begin a reply that was recorded from another exchange. Its chunks are sent without translation."""
        self._frames = None
        await self.start(status, content_type, headers, length=length)

    async def _reply(self, status: int, content: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        self._frames = None
        await self.start(status, content_type, headers, length=len(content))
        if not self.put(content, last=True):
            await self.drained()

    async def refuse(self, error: GatewayError) -> None:
        """Send an error. It is an error reply if nothing has been sent yet, else an event in the stream."""
        self.unwatch()
        if self._ended:
            return
        if self.status is not None:
            self._frames = None
            frame = error_frame(error) if self._translator is None else self._translator.error_frames(error)
            await self.send(frame, last=True)
            return
        self.reply_headers.update(error.headers)
        # OpenAI's SDKs decide by the status of a rejected request, but would repeat a 5xx that it causes each time.
        if not isinstance(error, UpstreamRefused) or error.upstream_status >= 500:
            self.reply_headers["x-should-retry"] = "true" if error.retryable else "false"
        refusal = None if self._translator is None else self._translator.error_response(error)
        status, content = refusal or status_and_body(error)
        await self._reply(status, content, JSON_TYPE, NO_HEADERS)

    def close(self) -> None:
        """Stop watching, and release the body's memory. Safe to call twice."""
        self.unwatch()
        self._wanted = _unwanted  # what it was may refer to this object, which would form a cycle
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
    """Create a coroutine only when it is awaited, because a coroutine that is never awaited causes a warning."""
    yield from begin().__await__()
