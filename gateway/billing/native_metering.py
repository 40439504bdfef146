"""Metering of answers that pass in the client's own API format: Anthropic's messages and OpenAI's responses.

The counts, bounds and estimates are those of `Meter`. Only the events are others: each has a `type`, and text is in the
events whose type says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gateway.billing.metering import Meter
from gateway.billing.passed_usage import usage_of
from gateway.billing.received_text import ReceivedText
from gateway.billing.reply_events import decode_event
from gateway.providers.native_formats import NATIVE_APIS
from gateway.providers.sse import UNREADABLE, data_of, split_frames
from gateway.types import Call, Usage

_DELTA_SUFFIX = ".delta"  # of the types of events with text in the Responses API
_TEXT_KEYS = frozenset({"text", "thinking", "partial_json", "refusal", "name", "arguments", "input"})


class _Event(msgspec.Struct):
    type: str = ""
    delta: Any = None


_event = msgspec.json.Decoder(_Event).decode
_body = msgspec.json.Decoder(dict[str, Any]).decode


class NativeMeter(Meter):
    """Meters one answer that passes in the client's API format."""

    __slots__ = ("_format",)

    def __init__(self, call: Call, api: str) -> None:
        super().__init__(call)
        self.text = ReceivedText(_texts)
        self._format = NATIVE_APIS[api]

    def watch(self, chunk: bytes) -> bytes:
        """Meter a chunk, and return it. See `Meter.watch`."""
        if not self._stream:
            self._read_whole(chunk)
        else:
            for frame in split_frames(chunk):
                if data := data_of(frame):
                    self._read_event(data, frame)
        return chunk

    def _read_event(self, data: bytes, frame: bytes) -> None:
        event = _event(data)  # the provider has checked that it is one
        if text := _text_of(event):
            if not self._text_begun:
                self._text_begun = True
                self._frame_bytes = max(0, len(frame) - len(text.encode(errors="replace")))
            self.text.add(frame, 1)
        elif data.find(b'"usage"') >= 0 or data.find(b'"service_tier"') >= 0:
            self._read_counts(data)
        if event.type in self._format.ends:
            self.complete = True

    def _read_counts(self, data: bytes) -> None:
        try:
            counted = decode_event(data)
        except UNREADABLE:  # a field with a name of the chat format has another form
            return
        self.service_tier = counted.tier or self.service_tier
        self._learn(counted, data)

    def _read_whole(self, body: bytes) -> None:
        self._read_counts(body)
        self.complete = True
        self._counted = self._count()
        self._words = b""
        if self._counted is None:
            self._answer_bytes = sum(len(text.encode(errors="replace")) for text in _generated(_body(body)))


class PassedStreamMeter(Meter):
    """Meters a stream of any other endpoint, by the event that has its usage, or else by its bytes."""

    __slots__ = ("_counting_event", "_ends", "_passed_bytes")

    def __init__(self, call: Call, ends: Callable[[bytes], bool]) -> None:
        """`ends` says whether the chunk that it gets is the stream's last one."""
        super().__init__(call)
        self._ends = ends
        self._passed_bytes = 0
        self._counting_event = b""

    def watch(self, chunk: bytes) -> bytes:
        """Meter a chunk, and return it. See `Meter.watch`."""
        if chunk.startswith(b"{"):  # a whole answer, although a stream was asked for
            self._counting_event = chunk
        self._passed_bytes += len(chunk)
        if chunk.find(b'"usage"') >= 0:
            for frame in split_frames(chunk):
                if (data := data_of(frame)).find(b'"usage"') >= 0:
                    self._counting_event = data
        self.complete = self._ends(chunk)
        return chunk

    @property
    def is_uncounted(self) -> bool:
        """Return False: the usage may be exact without the engine's counts."""
        return False

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        assert self._call.passed is not None
        return usage_of(self._call.passed, self._counting_event, self._passed_bytes)


def _text_of(event: _Event) -> str:
    """The generated text of an event. Events that repeat a whole text have none."""
    if isinstance(event.delta, str):
        return event.delta if event.type.endswith(_DELTA_SUFFIX) else ""
    if event.type == "content_block_delta" and isinstance(event.delta, dict):
        return "".join(text for name, text in event.delta.items() if name in _TEXT_KEYS and isinstance(text, str))
    return ""


def _texts(chunk: bytes) -> Iterator[str]:
    for frame in split_frames(chunk):
        if data := data_of(frame):
            try:
                yield _text_of(_event(data))
            except UNREADABLE:
                continue


def _generated(body: dict[str, Any]) -> Iterator[str]:
    """The generated texts of a complete answer: those in `content` of a message, or in `output` of a response."""
    nested: list[Any] = [body.get("content"), body.get("output")]
    while nested:
        value = nested.pop()
        if isinstance(value, list):
            nested += value
        elif isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, str) and name in _TEXT_KEYS:
                    yield inner
                elif isinstance(inner, (dict, list)):
                    nested.append(inner)
