"""Reads a request body, and limits the memory of one body and of all request bodies in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from starlette.types import Message, Receive

from gateway.core.errors import BodyTooLarge, GatewayError, Overloaded, RequestTimeout
from gateway.core.first_step import resume
from gateway.core.timers import WaitBound
from gateway.endpoints import wire as bounds
from gateway.endpoints.wire import ClientGone, Wire
from gateway.response_store import Room

BODIES_RETRY_SECONDS = 1.0  # retry-after if the memory for bodies is full; short, because calls end constantly


class BodyBudget:
    """Memory budget for all request bodies in flight. A body counts from its arrival until its reply has ended."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def fits(self, count: int) -> bool:
        return self.held_bytes + count <= self.max_bytes


class RequestBody:
    """The body of one request. Call `read` once, and `release` when the exchange is over."""

    __slots__ = ("_budget", "_headers", "_held_bytes", "_max_bytes", "_receive", "_wire")

    def __init__(
        self, headers: Mapping[bytes, bytes], receive: Receive, wire: Wire | None, *, max_bytes: int, budget: Room
    ) -> None:
        self._headers = headers
        self._receive = receive
        self._wire = wire
        self._max_bytes = max_bytes
        self._budget = budget
        self._held_bytes = 0

    def arrived(self) -> bytes | None:
        """Return the body if all of it came with the head, as is usual. If it returns None, call `read`."""
        body = None if self._wire is None else self._wire.whole_body()
        return None if body is None else self._checked(body)

    def check_announced(self) -> None:
        """Raise `BodyTooLarge` if the request announces a body that is too long. Reads nothing."""
        if self._announced_bytes() > self._max_bytes:
            raise self._too_large()

    def _announced_bytes(self) -> int:
        announced = self._headers.get(b"content-length", b"")
        return int(announced) if announced.isdigit() else 0

    async def read(self) -> bytes:
        """Return the complete body. Raises `BodyTooLarge`, `Overloaded`, `RequestTimeout` or `ClientGone`.

        What has not arrived of a rejected body is not read here: the HTTP server drops it after the reply.
        """
        receiving = self._whole_body().__await__()
        try:
            waits_for = next(receiving)
        except StopIteration as here:  # the usual case: the body arrived together with the request's headers
            return cast(bytes, here.value)
        bound = WaitBound(bounds.STALL_SECONDS)
        bound.begin()
        try:
            return await resume(receiving, waits_for)
        except asyncio.CancelledError:
            if not bound.expired:
                raise
            bound.uncancel()
            raise RequestTimeout(f"the body did not arrive within {bounds.STALL_SECONDS:g} s") from None
        finally:
            bound.close()

    def release(self) -> None:
        """Release the memory of the body. Safe to call twice."""
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0

    async def _whole_body(self) -> bytes:
        self.check_announced()
        if not self._budget.fits(self._announced_bytes()):
            raise self._no_memory()
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return self._checked(message.get("body", b""))
        return await self._collected(message)

    async def _collected(self, message: Message) -> bytes:
        """Return a body that arrives in several messages. `message` is the first one."""
        body = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            body += part
            # Count the bytes that have arrived, not content-length. Otherwise a client that announces a large body and
            # sends little could use up the budget.
            if len(body) > self._max_bytes or not self._hold(len(part)):
                error = self._too_large() if len(body) > self._max_bytes else self._no_memory()
                body.clear()
                raise error
            if not message.get("more_body"):
                return bytes(body)
            message = await self._receive()

    def _checked(self, body: bytes) -> bytes:
        size, budget = len(body), self._budget
        if size > self._max_bytes:
            raise self._too_large()
        if not budget.fits(size):
            raise self._no_memory()
        budget.held_bytes += size
        self._held_bytes += size
        return body

    def _hold(self, count: int) -> bool:
        if not self._budget.fits(count):
            return False
        self._budget.held_bytes += count
        self._held_bytes += count
        return True

    def _too_large(self) -> GatewayError:
        return BodyTooLarge(f"the body has more than {self._max_bytes} bytes")

    def _no_memory(self) -> GatewayError:
        return Overloaded(
            f"the bodies of all requests in flight may take {self._budget.max_bytes} bytes together; try again shortly",
            retry_after_seconds=BODIES_RETRY_SECONDS,
        )
