"""Reads the bodies of requests that create or change stored objects, such as conversations."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import ClientDisconnect, Request

from gateway.core.errors import BadRequest, BodyTooLarge, Overloaded, RequestTimeout
from gateway.endpoints.wire import STALL_SECONDS
from gateway.prompts.reader import Metadata
from gateway.response_store import Room

BODIES_RETRY_SECONDS = 1.0  # retry-after if the memory for bodies is full


class NewMetadata(msgspec.Struct):
    """A body that replaces an object's metadata."""

    metadata: Metadata


async def object_body(request: Request, room: Room, *, max_bytes: int) -> bytes:
    """Return the body. Raises `BodyTooLarge`, `Overloaded`, `RequestTimeout` or `BadRequest`.

    Its bytes do not count as held: the caller checks that there is room for them and works without waiting for clients.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(STALL_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
                if not room.fits(len(body)):
                    raise Overloaded(
                        "not enough memory for the body; try again shortly", retry_after_seconds=BODIES_RETRY_SECONDS
                    )
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {STALL_SECONDS:g} s") from None
    except ClientDisconnect:
        raise BadRequest("the client disconnected before the end of the body") from None
    return bytes(body)
