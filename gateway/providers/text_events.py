"""Recognises events that differ from an earlier event of their stream only in one text, as nearly all events do.

`sse.are_object_events` checks any event by parsing it. `TextEvents` compares an event with one that was checked before:
if both are equal before and after the text, only the text has to be checked. That takes a few comparisons of bytes,
however long the rest of the event is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

TextSink = Callable[[bytes, int], bool]
"""Receives a chunk of so many events that equal an event of an earlier chunk, except for one text.

They have neither counts nor an error, and do not end the stream, so nothing has to be read in them. Otherwise as `Sink`
(`gateway.providers.base`).
"""

LEARNED_MAX = 64  # events of a stream that are learned; in streams with more kinds of events, learning is useless

# A text that is not empty, in the fields that have one. JSON escapes quotes in strings, so the quote after the colon
# begins a string: the bytes before it can be in no other string.
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)": ?"((?:[^"\\]++|\\.)++)"')
_COUNTS = re.compile(rb'"usage"\s*:\s*\{')
# The inside of a JSON string: without control characters, and only with escapes of two characters.
_plain = re.compile(rb'[ !#-\[\]-~]*+(?:\\["\\/bfnrt][ !#-\[\]-~]*+)*+').fullmatch
_plain_characters = re.compile(r'[^"\\\x00-\x1f]*+(?:\\["\\/bfnrt][^"\\\x00-\x1f]*+)*+').fullmatch


class TextEvents:
    """The events of one stream that have the same form. Learn one of them, then count others."""

    __slots__ = ("_after", "_after_bytes", "_before", "_before_bytes", "_between", "_learned")

    def __init__(self) -> None:
        self._learned = 0
        self._set(b"\0", b"\0")  # which no event begins with

    def _set(self, before: bytes, after: bytes) -> None:
        self._before, self._after, self._between = before, after, after + before
        self._before_bytes, self._after_bytes = len(before), len(after)

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


def _are_plain(texts: bytes) -> bool:
    """Whether texts joined by spaces are the inside of JSON strings in UTF-8, without unusual escapes."""
    if texts.isascii():
        return _plain(texts) is not None
    try:
        return _plain_characters(texts.decode()) is not None
    except UnicodeDecodeError:
        return False
