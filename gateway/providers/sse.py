"""Parses server-sent events: splits a stream into frames, decides if it is complete, finds errors and bad events.

A frame is the bytes of one event, including the blank line that ends it. Lines end with LF, CRLF or CR, and an event
may have several `data:` lines (HTML standard, "server-sent events"). `FrameSplitter` splits the received bytes into
frames. `are_object_events` is the fast path for nearly all frames. `check_frames` reads all others: it rewrites
unusual frames to the usual form, with LF and one data line, and it alone decides where a stream ends. So everything
behind the providers sees the usual form only. These functions run for each chunk of every stream, so they search bytes
if possible and parse JSON only if necessary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_FRAME_BYTES = 8 * 1024 * 1024  # far above any text event; enough for audio or an image in base64

DONE = b"data: [DONE]\n\n"  # the frame that ends a stream, in the usual form
_BLANK_LINE = re.compile(rb"\n\r?\n")  # ends a frame; JSON strings escape newlines, so no frame contains one
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


@dataclass(frozen=True, slots=True)
class CheckedFrames:
    """Frames in the usual form, up to the end of the stream or the first bad event.

    At most one of `ended`, `malformed` and `error` is set. `error` is the value that an event reports, in any form.
    """

    chunk: bytes
    ended: bool = False
    malformed: bool = False
    error: Any = None


def check_frames(frames: bytes) -> CheckedFrames:
    """Check frames, the last of which may lack its blank line, and bring them into the usual form.

    Returns the same bytes if they have that form already. Servers send errors after status 200, some with a choice
    beside the error.
    """
    if frames.endswith(DONE) and are_object_events(frames.removesuffix(DONE)):
        return CheckedFrames(frames, ended=True)
    if not is_utf8(frames):
        return CheckedFrames(b"", malformed=True)
    checked: list[bytes] = []
    for event, data in _events(frames):
        if is_done(data):
            return CheckedFrames(b"".join([*checked, DONE]), ended=True)
        try:
            error = _error_in(data) if data else None
        except UNREADABLE:
            return CheckedFrames(b"".join(checked), malformed=True)
        if error:
            return CheckedFrames(b"".join(checked), error=error)
        checked.append(event)
    chunk = b"".join(checked)
    return CheckedFrames(frames if chunk == frames else chunk)


def _error_in(data: bytes) -> Any:
    """Return the error that an event reports, or a falsy value. Raises if the data is not a JSON object."""
    if _ERROR in data:
        return error_value(data)
    _check_object(data)
    return None


def is_done(data: bytes) -> bool:
    """Whether an event's data is the marker that ends a stream."""
    return data.strip() == b"[DONE]"


def ends_stream(chunk: bytes) -> bool:
    """Whether a chunk in the usual form ends its stream."""
    return chunk.endswith(DONE)


def is_utf8(data: bytes) -> bool:
    """Whether the bytes are valid UTF-8, as all JSON must be. msgspec does not check the strings that it skips."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _events(frames: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each event in the usual form, and its data. A comment has empty data."""
    if b"\r" in frames:
        frames = frames.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for event in frames.split(b"\n\n"):
        if event.startswith(b"data: {") and b"\n" not in event:
            yield event + b"\n\n", event[6:]
        elif event := event.strip(b"\n"):
            yield _usual_form(event.split(b"\n"))


def _usual_form(lines: list[bytes]) -> tuple[bytes, bytes]:
    """Return an event with all its data on one line, after its other lines, and the data."""
    pieces = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    others = [line + b"\n" for line in lines if not line.startswith(b"data:") and line != b"data"]
    data = b" ".join(pieces)  # a line break can stand only between two parts of a JSON object, and so can a space
    return b"".join([*others, b"data: %b\n" % data if pieces else b"", b"\n"]), data


def error_value(data: bytes) -> Any:
    """Return the error that a JSON object reports in any known form. Returns a falsy value if there is no error.

    Raises `msgspec.MsgspecError` if `data` is not a JSON object, and `RecursionError` if it is nested too deeply.
    """
    body = _error_body(data)
    return body.fields if body.object == "error" and not body.error else body.error


def count_events(frames: bytes) -> int:
    """Return the number of events with data in a chunk in the usual form. Comments do not count."""
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
_DATA_LINE = re.compile(rb"(?:\A|\n)data: ?([^\n]*)")


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


_NEXT_OBJECT, _NEXT_ARRAY = b"\n\ndata: {", b"]\t,[{"
_SHORTER = len(_NEXT_OBJECT) - len(_NEXT_ARRAY)
_ADDED = len(b"[[]]") - len(b"data: \n\n")


def join_objects(frames: bytes) -> bytes | None:
    """Return the data of events as one JSON array with an array for each object, so that all are decoded in one pass.

    None if an event is not `data: {...}` on one line. Invalid JSON of one event never reaches into the next: a tab is
    not valid in a JSON string, and a bracket that closes an array is not valid where an object is open.
    """
    if frames[:7] != b"data: {" or frames[-2:] != b"\n\n":  # comparing slices takes half the time of `startswith`
        return None
    arrays = frames[6:-2].replace(_NEXT_OBJECT, _NEXT_ARRAY)
    return b"[[%b]]" % arrays if arrays.find(b"\n") < 0 else None


def split_frames(chunk: bytes) -> Iterator[bytes]:
    """Split a chunk into its event frames. Each includes the blank line after it, so joining them gives the chunk."""
    start = 0
    for blank_line in _BLANK_LINE.finditer(chunk):
        yield chunk[start : blank_line.end()]
        start = blank_line.end()
    if start < len(chunk):
        yield chunk[start:]


def data_of(frame: bytes) -> bytes:
    """Return the data of a frame: its `data:` lines without their names. Empty for a comment."""
    if frame[:5] == b"data:" and frame.find(b"\n") == len(frame) - 2 and frame.find(b"\r") < 0:
        return frame[5:-2].strip()  # the usual frame, with one line
    return b"\n".join(line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:"))


def has_output(frames: bytes) -> bool:
    """Whether frames in the usual form contain output for the client: text, a tool call, an end or an error.

    Comments, events with only a role, and empty text do not count. An event that cannot be parsed counts as output.
    """
    lines = list(_DATA_LINE.finditer(frames))
    if not lines:
        return not frames.lstrip().startswith(b":")
    for line in lines:
        try:
            event = _event.decode(line[1])
        except UNREADABLE:  # includes [DONE]
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
# Raised by msgspec for what is not JSON, is nested too deeply, or has a string that is not UTF-8.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


_check_objects = msgspec.json.Decoder(list[tuple[_Object]]).decode


def are_object_events(frames: bytes) -> bool:
    """Whether `frames` are events in the usual form, each with one JSON object on one line, and no error among them.

    Nearly all reads return such events: one, because servers write one event at a time, or several if the gateway
    lags. Both are checked by a fixed number of searches and one pass of the JSON parser, so that an event costs less
    the more arrive together. Other frames need the slower functions of this module.
    """
    if (
        frames[:7] != b"data: {"
        or frames[-2:] != b"\n\n"
        or frames.find(b"\r") >= 0  # CR also ends a line
        or frames.find(_ERROR) >= 0
        or not (frames.isascii() or is_utf8(frames))
    ):
        return False
    size = len(frames)
    try:
        if frames.find(b"\n") == size - 2:
            _check_object(frames[6:])
            return True
        arrays = join_objects(frames)
        return arrays is not None and len(_check_objects(arrays)) == 1 + (size + _ADDED - len(arrays)) // _SHORTER
    except UNREADABLE:
        return False
