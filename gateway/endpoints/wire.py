"""The fast path to the client's connection that the gateway's HTTP server offers beside ASGI, and its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.providers.text_events import ClientFlow

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
STALL_SECONDS = 60.0  # limit for a complete request body to arrive, and for a client to read part of its reply
WIRE = "warmpath.wire"  # the scope extension that holds a `Wire`


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

    def coded_writer(self) -> tuple[ClientFlow, asyncio.Transport] | None:
        """Return the connection, to send parts of a body that are chunks of HTTP's transfer coding, and not the last.

        It may be called while the flow is not paused. None if the reply has no transfer coding, or has not begun.
        """

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` if the client disconnects before the end of the reply. None removes the callback."""
