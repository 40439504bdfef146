"""Translates a streamed chat answer to the events of the Responses API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.core.errors import GatewayError
from gateway.core.ids import random_bytes
from gateway.endpoints.chat_answers import read_answer
from gateway.endpoints.responses.response import ResponseObject
from gateway.providers.sse import event_data

Json = dict[str, Any]
PADDED_TO_CHARACTERS = 32  # a padded delta's length is a multiple of this, to hide the length of its text
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"[DONE]"


class ResponseEvents:
    """Translates the stream of one chat answer to the events of a response.

    The events of the first frame begin with `response.created`. The last frame yields all events except the final one.
    `end` returns the final event separately, because it may have to wait until the response is stored.
    """

    def __init__(self, response: ResponseObject, *, wants_obfuscation: bool) -> None:
        self._response = response
        self._wants_obfuscation = wants_obfuscation
        self._sequence_number = 0
        self._opening: tuple[str, ...] = ("created", "in_progress")  # events that have not been sent
        self._unsent: list[bytes] = []  # events before an error in the same chunk

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        """Return the events for complete frames. Raises `UpstreamCut` if a frame cannot be translated."""
        sent = self._unsent
        for data in event_data(chunk):
            if not data:
                sent.append(KEEP_ALIVE)  # an SSE comment, which engines send to keep the connection open
            elif data != DONE:
                events = self._response.read(read_answer(data))
                sent += self._created()
                sent += map(self._frame, events)
        if last:
            events = self._response.end()
            sent += self._created()
            sent += map(self._frame, events)
        self._unsent = []
        return b"".join(sent)

    def queued(self) -> bytes:
        """Return the first events of a response in the background, which is queued."""
        self._opening = ("in_progress",)
        response = self._response.json("queued")
        return b"".join(self._lifecycle(event, response) for event in ("created", "queued"))

    def started(self) -> bytes:
        """Return the events at the beginning of a stream that have not been sent."""
        return b"".join(self._created())

    def end(self) -> bytes:
        """Return the last event, which contains the complete response."""
        status = self._response.status
        return self._lifecycle(status, self._response.json(status))

    def failure(self, error: GatewayError) -> bytes:
        """Return the event `response.failed`, with the error and the items that have arrived.

        Open items get no `done` event, because an agent could then execute a tool call with incomplete arguments.
        """
        before = [*self._unsent, *self._created()]
        self._response.fail()
        return b"".join([*before, self._lifecycle("failed", self._response.json("failed", error))])

    def _created(self) -> Iterator[bytes]:
        """Yield the events at the beginning of a stream, unless they have been sent."""
        if self._opening:
            opening, self._opening = self._opening, ()
            for event in opening:
                yield self._lifecycle(event, self._response.json("in_progress"))

    def _lifecycle(self, event: str, response: Json) -> bytes:
        return self._frame({"type": f"response.{event}", "response": response})

    def _frame(self, event: Json) -> bytes:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        if self._wants_obfuscation and "delta" in event:
            event["obfuscation"] = _padding(event["delta"])
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _padding(text: str) -> str:
    count = -len(text) % PADDED_TO_CHARACTERS
    return random_bytes((count + 1) // 2).hex()[:count]
