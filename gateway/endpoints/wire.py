"""The fast path to the client's connection that our HTTP server offers beside ASGI, and its time limit."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol, TypeVar, cast

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
STALL_SECONDS = 60.0  # for a whole request body to arrive, and for a client to read anything of its reply
WIRE = "warmpath.wire"  # the scope extension that holds a `Wire`

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client disconnected before its request was read."""


class Wire(Protocol):
    """What an HTTP server may offer beside ASGI's coroutines, as the scope extension `WIRE`."""

    def whole_body(self) -> bytes | None:
        """The request body, once. None if part of it is missing or the client disconnected: use `receive` then."""

    def begin(self, status: int, lines: bytes, *, length: int | None, close: bool) -> bool:
        """Send the head of the reply without waiting. False: nothing was sent; use `send`, which may wait.

        `lines` are the headers, each with its CRLF. `length` and `close` repeat what they say of body and connection.
        """

    def write(self, chunk: bytes, last: bool) -> bool:
        """Send a part of the body without waiting. False: nothing was sent; use `send`."""

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` if the client disconnects before the end of the reply. None removes the callback."""


@types.coroutine
def resume(begun: Generator[Any, Any, Result], waits_for: Any) -> Generator[Any, Any, Result]:
    """Await a coroutine whose first step was run by hand: `yield from`, from its second step on (PEP 380).

    The common case, a coroutine that ends in its first step, then costs no task switch.
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
