"""Decides from the last events of a stream whether it is complete, although the server did not send `[DONE]`.

Some servers end a stream without the marker. The answer is complete if each choice has its `finish_reason`, the usage
arrived if the client asked for it, and the HTTP body ended cleanly.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from gateway.providers.sse import event_data
from gateway.types import Call

CHUNKS_MAX = 8  # the newest ones, in which all finish reasons and the usage must be
CHUNK_MAX_BYTES = 4096  # of each; a longer one is kept from a later event on


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None


_event = msgspec.json.Decoder(_Event).decode
_count = msgspec.json.Decoder(int | None).decode


class StreamTail:
    """The newest chunks of one stream, without events that differ from an earlier one only in their text.

    `add` runs for many chunks, so it usually only keeps a reference. `add_short` is `add` for chunks of at most
    `CHUNK_MAX_BYTES`.
    """

    __slots__ = ("_call", "_chunks", "add_short")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._chunks: deque[bytes] = deque(maxlen=CHUNKS_MAX)
        self.add_short = self._chunks.append

    def add(self, chunk: bytes) -> None:
        """Note a chunk, which is complete event frames."""
        self._chunks.append(chunk if len(chunk) <= CHUNK_MAX_BYTES else _last_frames(chunk))

    def is_complete(self) -> bool:
        """Whether the answer is complete, given that its body ended cleanly."""
        finished: set[int] = set()
        has_usage = False
        try:
            choices = _count(self._call.fields.get("n", b"1")) or 1
            for data in event_data(b"".join(self._chunks)):
                event = _event(data) if data else _Event()
                finished.update(choice.index for choice in event.choices or () if choice.finish_reason)
                has_usage = has_usage or bool(event.usage)
        except (msgspec.MsgspecError, RecursionError):
            return False
        return len(finished) >= choices and (has_usage or not self._call.include_usage)


def _last_frames(chunk: bytes) -> bytes:
    """The complete frames in the last `CHUNK_MAX_BYTES` of a chunk."""
    start = len(chunk) - CHUNK_MAX_BYTES
    for blank_line in (b"\n\n", b"\r\n\r\n"):
        if (end := chunk.find(blank_line, start)) >= 0:
            return chunk[end + len(blank_line) :]
    return b""
