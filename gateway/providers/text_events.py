"""Recognises events that differ from an earlier event of their stream only in one text, as nearly all events do.

`sse.are_object_events` checks any event by parsing it. `TextEvents` compares an event with one that was checked before:
if both are equal before and after the text, only the text has to be checked. That takes a few comparisons of bytes,
however long the rest of the event is.

`DirectText` does so with the bytes of the connection: the usual read of a stream is one chunk of HTTP's transfer coding
that contains one such event, and the client gets the same bytes. `gateway.providers.native_relay` does the same for a
stream's connections in native code.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Protocol

LEARNED_MAX = 64  # events of a stream that are learned; in streams with more kinds of events, learning is useless
CODED_FORMS_MAX = 1024  # lengths of reads for which the coded form of the event is kept

# A text that is not empty, in the fields that have one. JSON escapes quotes in strings, so the quote after the colon
# begins a string: the bytes before it can be in no other string.
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)": ?"((?:[^"\\]++|\\.)++)"')
_COUNTS = re.compile(rb'"usage"\s*:\s*\{')
# The inside of a JSON string: without control characters, and only with escapes of two characters.
_plain = re.compile(rb'[ !#-\[\]-~]*+(?:\\["\\/bfnrt][ !#-\[\]-~]*+)*+').fullmatch
_plain_characters = re.compile(r'[^"\\\x00-\x1f]*+(?:\\["\\/bfnrt][^"\\\x00-\x1f]*+)*+').fullmatch


class TextEvents:
    """The events of one stream that have the same form. Learn one of them, then count others."""

    __slots__ = ("_after", "_after_bytes", "_before", "_before_bytes", "_between", "_learned", "coded_forms")

    def __init__(self) -> None:
        self._learned = 0
        self.coded_forms: dict[int, CodedForm] = {}  # of the learned event, by the length of the coded chunk
        self._set(b"\0", b"\0")  # which no event begins with

    def _set(self, before: bytes, after: bytes) -> None:
        self._before, self._after, self._between = before, after, after + before
        self._before_bytes, self._after_bytes = len(before), len(after)
        self.coded_forms.clear()

    @property
    def form(self) -> tuple[bytes, bytes]:
        """What the learned event has before and after its text."""
        return self._before, self._after

    def learn(self, frames: bytes) -> None:
        """Learn the form of the first of these valid frames, if it is an event in the usual form, and has no counts."""
        event = frames[: frames.find(b"\n") + 2]
        if self._learned == LEARNED_MAX or event[:7] != b"data: {" or event[-2:] != b"\n\n":
            return
        text = _TEXT.search(event)
        if text is None or _COUNTS.search(event) or event.find(b"[DONE]") >= 0:
            return
        self._learned += 1
        self._set(event[: text.start(1)], event[text.end(1) :])

    def count(self, frames: bytes) -> int:
        """Return the number of events if all of them have the learned form. Returns 0 for any other frames.

        Then each is one JSON object in UTF-8, with the fields of the learned event. Frames that have that form may also
        return 0, if their texts are unusual.
        """
        start, end = self._before_bytes, len(frames) - self._after_bytes
        if frames[:start] != self._before or start > end or frames[end:] != self._after:
            return 0
        if _plain(frames, start, end) is not None:
            return 1
        between, quote = self._between, frames.find(b'"', start, end)
        texts: list[bytes] = []
        while quote >= 0:
            following = quote + len(between)
            if following > end or frames[quote:following] != between:
                return 0
            texts.append(frames[start:quote])
            start, quote = following, frames.find(b'"', following, end)
        texts.append(frames[start:end])
        # After a space, neither an escape nor a character can continue.
        return len(texts) if _are_plain(b" ".join(texts)) else 0

    def add_coded_form(self, size: int) -> CodedForm:
        """Return the form of a chunk of the transfer coding of `size` bytes that contains one event, and keep it."""
        if len(self.coded_forms) >= CODED_FORMS_MAX:
            self.coded_forms.clear()
        length = next(size - 4 - digits for digits in range(1, 17) if size - 4 - digits < 16**digits)
        line = b"%x\r\n" % max(length, 0)
        before, after = line + self._before, self._after + b"\r\n"
        if len(before) + len(after) > size or len(line) + length + 2 != size:
            before = b"\0"  # which no chunk begins with: it has no room for a text, or there is no chunk of that size
        form = self.coded_forms[size] = before, len(before), after, size - len(after), length
        return form


CodedForm = tuple[bytes, int, bytes, int, int]
"""What a chunk of the transfer coding has before and after a text, each with the text's offset, and its bytes."""


class Received(Protocol):
    """Counts the frames of a stream (`gateway.billing.received_text.ReceivedText`)."""

    events: int
    received: int
    sample: list[bytes]
    sample_max: int


class Wait(Protocol):
    """Bounds the time without a chunk (`gateway.core.timers.WaitBound`)."""

    since: float | None
    refresh: Callable[[], None] | None


class ClientFlow(Protocol):
    """Whether a client's connection takes bytes now. Not after it is lost."""

    write_paused: bool
    when_lost: Callable[[], None] | None  # called when the connection is lost, before its socket is closed


class DirectText:
    """Passes events that only add text from a deployment's connection to that of a client, in one call for each.

    `take` gets what was read from the deployment. If that is one chunk of the transfer coding with one event of the
    learned form, the client gets the same bytes: nothing is parsed, decoded or encoded. Otherwise `take` returns False
    and has done nothing, and the bytes take the usual way, which does everything that is done here, and all else.

    Each layer between the two connections sets its own part before the first read, or uses no `DirectText`.
    """

    __slots__ = (
        "_forms", "_texts", "begins_frame", "client", "flow", "note_text", "now", "received", "until", "wait", "write",
    )  # fmt: skip

    def __init__(self, received: Received, flow: ClientFlow, client: asyncio.Transport, until: float) -> None:
        """`client` is the client's connection. From `until` received bytes on, nothing is taken."""
        self.received = received
        self.flow = flow
        self.client = client
        self.write: Callable[[bytes], object] = client.write
        self.until = until
        self.note_text: Callable[[bytes], object] | None = None  # records the answer, so that it may be resumed
        self.wait: Wait
        self.now: Callable[[], float]
        self._texts: TextEvents
        self.begins_frame = False  # whether the next bytes begin a frame

    def use(self, texts: TextEvents, *, begins_frame: bool) -> None:
        """Pass on the events that `texts` recognises."""
        self._texts, self._forms, self.begins_frame = texts, texts.coded_forms, begins_frame

    @property
    def form(self) -> tuple[bytes, bytes]:
        """What the events that are passed on have before and after their text."""
        return self._texts.form

    def take(self, data: bytes) -> bool:
        """Pass on what was read, if it is one chunk. The last read must have ended with a chunk."""
        size = len(data)
        before, start, after, end, length = self._forms.get(size) or self._texts.add_coded_form(size)
        if data[:start] != before or data[end:] != after or not self.begins_frame:
            return False
        if _plain(data, start, end) is None and not _are_plain(data[start:end]):
            return False
        text = self.received
        before_bytes = text.received
        received = before_bytes + length
        if received >= self.until or self.flow.write_paused:
            return False
        self.write(data)
        self.wait.since = self.now()
        text.events += 1
        text.received = received
        if before_bytes < text.sample_max:
            text.sample.append(data[-length - 2 : -2])
        if self.note_text is not None:
            self.note_text(data[-length - 2 : -2])
        return True


class TextSink:
    """Receives the events of a stream that equal an event of an earlier chunk, except for one text.

    They have neither counts nor an error, and do not end the stream, so nothing has to be read in them. `take` gets a
    chunk of so many events; otherwise it is as `Sink` (`gateway.providers.base`). `direct` may get them instead.
    """

    __slots__ = ("direct", "take")

    def __init__(self, take: Callable[[bytes, int], bool], direct: DirectText | None = None) -> None:
        self.take = take
        self.direct = direct


def _are_plain(texts: bytes) -> bool:
    """Whether texts joined by spaces are the inside of JSON strings in UTF-8, without unusual escapes."""
    if texts.isascii():
        return _plain(texts) is not None
    try:
        return _plain_characters(texts.decode()) is not None
    except UnicodeDecodeError:
        return False
