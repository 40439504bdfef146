"""The fast path to the client's connection that the gateway's HTTP server offers beside ASGI, and its time limit."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol, TypeVar, cast

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
STALL_SECONDS = 60.0  # limit for a complete request body to arrive, and for a client to read part of its reply
WIRE = "warmpath.wire"  # the scope extension that holds a `Wire`

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client disconnected before its request was read."""


class Wire(Protocol):
    """Synchronous interface to a client's connection. An HTTP server may offer it as the scope extension `WIRE`."""

    def whole_body(self) -> bytes | None:
        """Return the request body; call this once.

        Returns None if part of the body has not arrived or the client disconnected. Then use ASGI's `receive`.
        """

    def begin(self, status: int, lines: bytes, *, length: int | None, close: bool) -> bool:
        """Send the status and headers of the reply without waiting.

        Returns False if nothing was sent. Then use ASGI's `send`, which may wait. `lines` are the headers, each with
        its CRLF. `length` is the value of content-length among them, and `close` is true for "connection: close".
        """

    def write(self, chunk: bytes, last: bool) -> bool:
        """Send a part of the body without waiting. Returns False if nothing was sent. Then use ASGI's `send`."""

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` if the client disconnects before the end of the reply. None removes the callback."""


@types.coroutine
def resume(begun: Generator[Any, Any, Result], waits_for: Any) -> Generator[Any, Any, Result]:
    """Await a coroutine whose first step the caller has run, like `yield from` after its first step (PEP 380).

    `begun` is the coroutine, and `waits_for` is the result of its first step. A coroutine that ends in its first step,
    which is the common case, then needs no task switch.
    """
    while True:
        try:
            came = yield waits_for
        except BaseException as error:  # noqa: BLE001 - passed on, as `yield from` does
            step = partial(begun.throw, error)
        else:
            step = partial(begun.send, came)
        try:
            waits_for = step()
        except StopIteration as end:
            return cast(Result, end.value)
