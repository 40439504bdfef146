"""The bytes that leave, and the one place that renders an error.

An `Exchange` is one request and its reply on the ASGI border. It reads the body once and bounded, sends one reply,
and listens for the client's leaving: a bare ASGI callable is not told of it in any other way.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import orjson
from starlette.types import Message, Receive, Scope, Send

from gateway.core.errors import BodyTooLarge, GatewayError, Overloaded, RequestTimeout, UpstreamRefused
from gateway.core.timers import WaitBound
from gateway.endpoints.base import Translator
from gateway.response_store import StoringTranslator

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
DISCARD_MAX_BYTES = 64 * 2**20  # of a body over the cap, read and dropped so that the client can read its refusal
STALL_SECONDS = 60.0  # for a whole body to arrive, or for a client to take anything of its reply
BODIES_RETRY_SECONDS = 1.0  # when a body that found no room may: calls end all the time
WIRE = "warmpath.wire"
CLIENT_CLOSED_STATUS = 499  # of a reply that nobody was there to get; stands in telemetry only
MAX_WORDS_CHARACTERS = 300  # of an upstream's own words in an error of ours
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


Result = TypeVar("Result")


class ClientGone(Exception):
    """The client left before its request was read."""


class Wire(Protocol):
    """What a server may offer beside ASGI's coroutines, in the scope's extensions under `WIRE`."""

    def whole_body(self) -> bytes | None:
        """The request's body, once; None where it is not all there yet, or nobody is there any more: `receive` it."""

    def begin(self, status: int, lines: bytes, *, length: int | None, close: bool) -> bool:
        """Send a head without waiting: `lines` are its headers, each with its CRLF; `length` and `close` say what they
        say of the body and of the connection. False: nothing was sent; `send` it, which waits if it has to.
        """

    def write(self, chunk: bytes, last: bool) -> bool:
        """Send a part of the body without waiting. False: nothing was sent; `send` it."""

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """`tell` is called when the client leaves before the reply's end; None: nobody wants to know any more."""


class BodyBudget:
    """The bytes of all bodies that are held at once, each from its arrival to the end of its exchange."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def fits(self, count: int) -> bool:
        return self.held_bytes + count <= self.max_bytes


class Exchange:
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
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.client_gone = False  # it left, or takes nothing any more
        self.status: int | None = None
        self.reply_headers: dict[str, str] = {}  # sent with whatever reply is sent
        self._translator = translator  # of a wire that is not the house's own
        self._frames = None if translator is None else translator.frames  # while an answer's frames leave
        self._storing_translator: StoringTranslator | None = (
            translator if translator and isinstance(translator, StoringTranslator) else None
        )
        self._receive = receive
        self._send = send
        self._wire: Wire | None = scope.get("extensions", {}).pop(WIRE, None)  # out: the two would hold each other
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies
        self._held_bytes = 0  # of them
        self._ended = False
        self._bound: WaitBound | None = None
        self._watch: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._wanted: Callable[[], bool] = _nobody
        self._sending: Awaitable[None] | None = None  # a `send` that has to wait

    async def body(self) -> bytes:
        """The whole body. Raises `BodyTooLarge`, `Overloaded`, `RequestTimeout` or `ClientGone`."""
        if self._wire is not None and (body := self._wire.whole_body()) is not None:
            return self._checked(body)
        receiving = self._whole_body().__await__()
        try:
            waits_for = next(receiving)
        except StopIteration as here:  # as is mostly so: it came with the head
            return cast(bytes, here.value)
        bound = self._waits()
        bound.begin()
        try:
            return await resume(receiving, waits_for)
        except asyncio.CancelledError:
            if not bound.expired:
                raise
            bound.uncancel()
            raise RequestTimeout(f"the body did not arrive within {STALL_SECONDS:g} s") from None
        finally:
            bound.end()

    async def _whole_body(self) -> bytes:
        announced = self.headers.get(b"content-length", b"")
        length = int(announced) if announced.isdigit() else 0
        if length > self._max_body_bytes or not self._bodies.fits(length):
            if b"expect" not in self.headers:  # who asks first has not begun to send
                await self._discard()
            raise self._too_large() if length > self._max_body_bytes else self._no_room()
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return self._checked(message.get("body", b""))
        return await self._rest_of_body(message)

    def _checked(self, body: bytes) -> bytes:
        if len(body) > self._max_body_bytes:
            raise self._too_large()
        if not self._hold(len(body)):
            raise self._no_room()
        return body

    async def _rest_of_body(self, message: Message) -> bytes:
        body = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                self.client_gone = True
                raise ClientGone
            part = message.get("body", b"")
            body += part
            # What has arrived is counted, not what is announced: who announces much and sends little takes no room.
            if len(body) > self._max_body_bytes or not self._hold(len(part)):
                error = self._too_large() if len(body) > self._max_body_bytes else self._no_room()
                body.clear()
                if message.get("more_body"):
                    await self._discard()
                raise error
            if not message.get("more_body"):
                return bytes(body)
            message = await self._receive()

    def _hold(self, count: int) -> bool:
        if not self._bodies.fits(count):
            return False
        self._bodies.held_bytes += count
        self._held_bytes += count
        return True

    async def _discard(self) -> None:
        """Read on without keeping, up to a bound: a client that is still writing does not read its refusal."""
        bound, dropped = self._waits(), 0
        try:
            while dropped < DISCARD_MAX_BYTES:
                message = await self._receive()
                dropped += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
        except asyncio.CancelledError:
            if not bound.expired:
                raise
            bound.uncancel()
        self.reply_headers["connection"] = "close"

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body has more than {self._max_body_bytes} bytes")

    def _no_room(self) -> Overloaded:
        return Overloaded(
            f"the requests that are here have {self._bodies.max_bytes} bytes together, and no more are taken",
            retry_after_seconds=BODIES_RETRY_SECONDS,
        )

    def _waits(self) -> WaitBound:
        if self._bound is None:
            self._bound = WaitBound(STALL_SECONDS)
        return self._bound

    def watch(self) -> asyncio.Task[Any]:
        """From now on the present task, which is returned, is cancelled when the client leaves; see `stay_while`."""
        task = self._task = asyncio.current_task()
        assert task is not None
        if self._wire is not None:
            self._wire.when_gone(self._gone)
        else:
            self._watch = asyncio.create_task(self._listen())
        return task

    def unwatch(self) -> None:
        """What the client does now changes nothing any more. ASGI calls the end of the reply a disconnect, too."""
        if self._task is None:
            return
        self._task = None
        if self._wire is not None:
            self._wire.when_gone(None)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # it holds this exchange

    def stay_while(self, wanted: Callable[[], bool]) -> None:
        """Work on for others when the client leaves, as long as `wanted`; `leave_if_gone` looks again."""
        self._wanted = wanted

    def leave_if_gone(self) -> None:
        if self.client_gone and not self._wanted() and self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self.client_gone = True
        self.leave_if_gone()

    async def start(
        self, status: int, content_type: str, headers: Mapping[str, str] = NO_HEADERS, *, length: int | None = None
    ) -> None:
        """The head of the reply; `length` of its body where that is known."""
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
                raise ValueError(f"a header of the reply would break out of its line: {named}")
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
        """Send bytes of an answer in the words of the client's wire, without waiting. False: the client takes no more;
        await `drained` before the next.

        ASGI's `send` is a coroutine, but one that ends at once as long as there is room: it is begun here, and
        finished in `drained` if it has to wait.
        """
        if self._frames is not None and not (chunk := self._frames(chunk, last=last)) and not last:
            return True
        if last:
            self._ended = True
            self.unwatch()
            if self._storing_translator is not None and self._storing_translator.waits and not self.client_gone:
                self._sending = _later(partial(self._send_end, self._storing_translator, chunk))
                return False
        if self.client_gone or (self._wire is not None and self._wire.write(chunk, last)):
            return True
        return self._begin_to_send({"type": "http.response.body", "body": chunk, "more_body": not last})

    async def send(self, chunk: bytes, *, last: bool = False) -> None:
        """As `put`; waits while the client takes nothing, up to `STALL_SECONDS`."""
        if self._sending is not None:
            await self.drained()
        if not self.put(chunk, last=last):
            await self.drained()

    async def _send_end(self, storing: StoringTranslator, chunk: bytes) -> None:
        """The last bytes of an answer that is kept first."""
        chunk += await storing.rest()
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
        """Wait until what was put has been taken."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        bound = self._waits()
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
        """A whole answer at once, in the words of the client's wire."""
        if self._translator is not None:
            content = self._translator.answer(content)
        if self._storing_translator is not None and self._storing_translator.waits and not self.client_gone:
            content += await self._storing_translator.rest()
        await self._reply(status, content, content_type, headers)

    async def _reply(self, status: int, content: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        self._frames = None
        await self.start(status, content_type, headers, length=len(content))
        await self.send(content, last=True)

    async def refuse(self, error: GatewayError) -> None:
        """Tell the client of an error: as a status while nothing has been sent, in the stream afterwards."""
        self.unwatch()
        if self._ended:
            return
        if self.status is not None:
            self._frames = None
            told = error_frame(error) if self._translator is None else self._translator.failure(error)
            await self.send(told, last=True)
            return
        self.reply_headers.update(error.headers)
        if not isinstance(error, UpstreamRefused):
            self.reply_headers["x-should-retry"] = "true" if error.retryable else "false"
        refusal = None if self._translator is None else self._translator.refusal(error)
        status, content = refusal or _refusal(error)
        await self._reply(status, content, JSON_TYPE, NO_HEADERS)

    def close(self) -> None:
        """Stop listening, and let go of the body. Safe to call twice."""
        self.unwatch()
        if self._storing_translator is not None:
            self._storing_translator.let_go()
        self._bodies.held_bytes -= self._held_bytes
        self._held_bytes = 0
        if self._bound is not None:
            self._bound.close()


def _nobody() -> bool:
    return False


@types.coroutine
def resume(begun: Generator[Any, Any, Result], waits_for: Any) -> Generator[Any, Any, Result]:
    """Await what has been begun by hand and waits for something: `yield from`, from its second step on (PEP 380)."""
    while True:
        try:
            came = yield waits_for
        except BaseException as error:  # noqa: BLE001 - handed on, as `yield from` does
            step = partial(begun.throw, error)
        else:
            step = partial(begun.send, came)
        try:
            waits_for = step()
        except StopIteration as end:
            return cast(Result, end.value)


@types.coroutine
def _later(begin: Callable[[], Coroutine[Any, Any, None]]) -> Generator[Any, Any, None]:
    """What is begun only when it is awaited, which may be never."""
    yield from begin().__await__()


def _refusal(error: GatewayError) -> tuple[int, bytes]:
    if isinstance(error, UpstreamRefused):
        return error.upstream_status, _own_words(error)
    return error.status, render_error(error)


def render_error(error: GatewayError) -> bytes:
    return orjson.dumps({"error": error.body()})


def error_frame(error: GatewayError) -> bytes:
    """An error after the first byte: one event, and no `[DONE]` behind it."""
    return b"data: " + render_error(error) + b"\n\n"


def _own_words(error: UpstreamRefused) -> bytes:
    """The upstream's refusal as it came, where it is JSON; anything else would be a page in the gateway's name."""
    if error.content_type.partition(";")[0].strip().lower() == JSON_TYPE:
        return error.content
    words = error.content[: 4 * MAX_WORDS_CHARACTERS].decode("utf-8", "replace")[:MAX_WORDS_CHARACTERS]
    return orjson.dumps({"error": {**error.body(), "message": f"{error.message}: {words}"}})
