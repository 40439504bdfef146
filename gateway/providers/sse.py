"""Parses server-sent events: splits a stream into frames, decides if it is complete, finds errors and bad events.

A frame is the bytes of one event, including the blank line that ends it. Lines end with LF, CRLF or CR (HTML standard,
"server-sent events"). `FrameSplitter` splits the received bytes into frames. `is_single_object_event` is the fast path
for nearly all frames. Other frames are checked by `first_malformed_at`, `find_error` and `ends_stream`. These functions
run for each chunk of every stream, so they search bytes if possible and parse JSON only if necessary.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_FRAME_BYTES = 8 * 1024 * 1024  # far above any text event; enough for audio or an image in base64

_DONE = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\][ \t]*[\r\n]*\Z")
_LONGEST_DONE_BYTES = 24  # the search for [DONE] covers this many bytes at the end
_ERROR = b'"error"'  # a field's name; inside a JSON string its quotes would be escaped by backslashes


class FrameTooLong(ValueError):
    """An event exceeds the size limit."""


class FrameSplitter:
    """Splits bytes into complete frames as they arrive. Buffers the beginning of an incomplete frame."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add received bytes. Returns the frames that are now complete, or b"" if none is. Raises `FrameTooLong`.

        Servers write one event at a time, so nearly every read ends with a complete event, which is not copied.
        """
        if not self._held and data.endswith(b"\n\n"):
            return data
        searched = max(len(self._held) - 3, 0)  # a blank line may begin in the last buffered bytes
        self._held += data
        end = _last_end(self._held, searched)
        if len(self._held) - end > self._max_frame_bytes:
            raise FrameTooLong(f"an event is longer than {self._max_frame_bytes} bytes")
        frames = bytes(self._held[:end])
        del self._held[:end]
        return frames

    @property
    def rest(self) -> bytes:
        """Return the buffered bytes. At the end of a stream, they are a frame that was cut or lacks its blank line."""
        return bytes(self._held)


def _last_end(data: bytearray, start: int) -> int:
    """Return the offset after the last blank line at or after `start`, or 0 if there is none."""
    lf = data.rfind(b"\n\n", start)
    crlf = data.rfind(b"\n\r\n", start)  # the last three bytes of CRLF CRLF
    cr = data.rfind(b"\r\r", start)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0, cr + 2 if cr >= 0 else 0)


def ends_stream(frames: bytes) -> bool:
    """Whether the last frame is `data: [DONE]`, with or without its blank line.

    A generated text that contains `[DONE]` does not match, because no line begins inside a JSON string.
    """
    return frames.find(b"[DONE]", -_LONGEST_DONE_BYTES) >= 0 and _DONE.search(frames) is not None


def find_error(frames: bytes) -> tuple[int, Any] | None:
    """Return the offset and the error value of the first event that reports an error, or None if there is none.

    Servers send such events after status 200, some with a choice beside the error.
    """
    if frames.find(_ERROR) < 0:
        return None
    for line in _DATA_LINE.finditer(frames):
        if line[1].find(_ERROR) < 0:
            continue
        try:
            error = error_value(line[1])
        except _UNREADABLE:
            error = "unreadable"
        if error:
            return frames.rfind(b"data:", 0, line.start(1)), error
    return None


def error_value(data: bytes) -> Any:
    """Return the error that a JSON object reports in any known form. Returns a falsy value if there is no error.

    Raises `msgspec.MsgspecError` if `data` is not a JSON object, and `RecursionError` if it is nested too deeply.
    """
    body = _error_body(data)
    return body.fields if body.object == "error" and not body.error else body.error


def count_events(frames: bytes) -> int:
    """Return the number of events with data. Comments do not count."""
    return sum(1 for _ in _DATA_LINE.finditer(frames))


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None


class _ErrorBody(msgspec.Struct):
    error: Any = None
    object: Any = None  # older servers send "error" here, with the error's fields beside it
    message: Any = None
    type: Any = None
    param: Any = None
    code: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("message", "type", "param", "code")}


_event = msgspec.json.Decoder(_Event)
_error_body = msgspec.json.Decoder(_ErrorBody).decode
_DATA_LINE = re.compile(rb"(?:\A|[\r\n])data: ?([^\r\n]*)")


def event_data(frames: bytes) -> list[bytes]:
    """Return the data of each event, in order. A frame that is only a comment has empty data."""
    found: list[bytes] = []
    data: list[bytes] = []
    in_frame = False
    for line in frames.splitlines():
        if line:
            in_frame = True
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
        elif in_frame:
            found.append(b"\n".join(data))
            data, in_frame = [], False
    return [*found, b"\n".join(data)] if in_frame else found


def has_output(frames: bytes) -> bool:
    """Whether the frames contain output for the client: text, a tool call, an end or an error.

    Comments, events with only a role, and empty text do not count. An event that cannot be parsed counts as output.
    """
    lines = list(_DATA_LINE.finditer(frames))
    if not lines:
        return not frames.lstrip().startswith(b":")
    for line in lines:
        try:
            event = _event.decode(line[1])
        except _UNREADABLE:  # includes [DONE]
            return True
        if event.error is not None or event.choices is None:
            return True
        for choice in event.choices:
            delta = choice.delta or {}
            if choice.text or choice.finish_reason or any(value for name, value in delta.items() if name != "role"):
                return True
    return False


class _Object(msgspec.Struct):
    """Any JSON object. The decoder skips all fields, but checks that they are valid JSON."""


_check_object = msgspec.json.Decoder(_Object).decode
_UNREADABLE = (msgspec.MsgspecError, RecursionError)  # not JSON, or nested too deeply
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r){2}")


def is_single_object_event(frames: bytes) -> bool:
    """Whether `frames` is exactly one event whose data is one JSON object on one line, and not an error.

    Nearly all reads return one such event, because servers write one event at a time. The check takes half a
    microsecond. Other frames need the slower functions of this module.
    """
    if (
        not frames.startswith(b"data: {")
        or not frames.endswith(b"\n\n")
        or frames.count(b"\n") != 2
        or frames.find(b"\r") >= 0  # CR also ends a line
        or frames.find(_ERROR) >= 0
    ):
        return False
    try:
        _check_object(frames[6:])
    except _UNREADABLE:
        return False
    return True


def first_malformed_at(frames: bytes) -> int | None:
    """Return the offset of the first event whose data is neither a JSON object nor `[DONE]`, or None."""
    start = 0
    for end in [*(blank.end() for blank in _BLANK_LINE.finditer(frames)), len(frames)]:
        data = b"\n".join(line[1] for line in _DATA_LINE.finditer(frames[start:end])).strip()
        if data and data != b"[DONE]":
            try:
                _check_object(data)
            except _UNREADABLE:
                return start
        start = end
    return None
