"""A stream of a chat's frames as the events of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.core.errors import GatewayError
from gateway.core.ids import random_bytes
from gateway.endpoints.chat_answers import read_answer
from gateway.endpoints.responses.response import Response
from gateway.providers.sse import event_data

Json = dict[str, Any]
PADDED_TO_CHARACTERS = 32  # a delta and its padding, or a multiple of it: its length says little then
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"[DONE]"


class EventStream:
    """`response.created` comes with the first frame, and what ends before the response does with the last; then the
    response's own end is to be told.
    """

    def __init__(self, response: Response, *, obfuscates: bool) -> None:
        self._response = response
        self._obfuscates = obfuscates
        self._sequence_number = 0
        self._untold: list[bytes] = []  # what came in one chunk with what can not be read

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        """Raises `UpstreamCut`."""
        told = self._untold
        for data in event_data(chunk):
            if not data:
                told.append(KEEP_ALIVE)  # a comment, and that is what servers send it for
            elif data != DONE:
                events = self._response.read(read_answer(data))
                told += self._begun()
                told += map(self._frame, events)
        if last:
            events = self._response.end()
            told += self._begun()
            told += map(self._frame, events)
        self._untold = []
        return b"".join(told)

    def end(self) -> bytes:
        """The response has come to its end, and this is what it is."""
        status = self._response.status
        return self._lifecycle(status, self._response.json(status))

    def failure(self, error: GatewayError) -> bytes:
        """What there is of the answer, and why there is no more of it.

        No item is told to be done: an agent would make a call of which half the arguments are there.
        """
        before = [*self._untold, *self._begun()]
        self._response.fail()
        return b"".join([*before, self._lifecycle("failed", self._response.json("failed", error))])

    def _begun(self) -> Iterator[bytes]:
        if not self._sequence_number:
            for event in ("created", "in_progress"):
                yield self._lifecycle(event, self._response.json("in_progress"))

    def _lifecycle(self, event: str, response: Json) -> bytes:
        return self._frame({"type": f"response.{event}", "response": response})

    def _frame(self, event: Json) -> bytes:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        if self._obfuscates and "delta" in event:
            event["obfuscation"] = _padding(event["delta"])
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _padding(text: str) -> str:
    count = -len(text) % PADDED_TO_CHARACTERS
    return random_bytes((count + 1) // 2).hex()[:count]
