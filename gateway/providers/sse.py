"""Server-sent events, as far as a relay needs them: where one ends, and whether it ends the stream.

A frame is the bytes of one event with the blank line that ends it; lines end with LF, CRLF or CR (HTML standard,
"server-sent events"). Everything here runs once per chunk of every stream, and so looks at bytes, not at events.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_FRAME_BYTES = 8 * 1024 * 1024  # far above any text; room for an event with audio or an image in base64

_DONE = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\][ \t]*[\r\n]*\Z")
_LONGEST_DONE_BYTES = 24  # how far before the end the search for it begins
_ERROR = b'"error"'  # a field: in a text its quotes would have backslashes before them


class FrameTooLong(ValueError):
    """An event went past the bound without coming to its end."""


class FrameSplitter:
    """Bytes in as they come, whole frames out. What is held back is the beginning of a frame without its end."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Every frame that is whole by now, one or several, or b"".

        Servers write an event at a time, so nearly every read ends with one: it is passed on without a copy.
        """
        if not self._held and data.endswith(b"\n\n"):
            return data
        searched = max(len(self._held) - 3, 0)  # a blank line may have begun in the last bytes held
        self._held += data
        end = _last_end(self._held, searched)
        if len(self._held) - end > self._max_frame_bytes:
            raise FrameTooLong(f"an event is longer than {self._max_frame_bytes} bytes")
        frames = bytes(self._held[:end])
        del self._held[:end]
        return frames

    @property
    def rest(self) -> bytes:
        """What is held; at the end of the stream, a frame that was cut or lacks its blank line."""
        return bytes(self._held)


def _last_end(data: bytearray, start: int) -> int:
    """The offset behind the last blank line at or after `start`; 0 without one."""
    lf = data.rfind(b"\n\n", start)
    crlf = data.rfind(b"\n\r\n", start)  # the last three bytes of CRLF CRLF
    cr = data.rfind(b"\r\r", start)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0, cr + 2 if cr >= 0 else 0)


def ends_stream(frames: bytes) -> bool:
    """Whether the last frame is `data: [DONE]`, with or without its blank line.

    Text that mentions it does not count: that is inside a JSON string, where no line begins.
    """
    return frames.find(b"[DONE]", -_LONGEST_DONE_BYTES) >= 0 and _DONE.search(frames) is not None


def find_error(frames: bytes) -> tuple[int, Any] | None:
    """Where the server says that it failed, as an offset, and what it says. Servers send such an event after a 200,
    some with a choice beside it.
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
    """What a JSON object says of a failure, in whatever form, where it is no answer. Raises `msgspec.MsgspecError`, or
    `RecursionError` for what is too deep.
    """
    told = _failed(data)
    return told.told if told.object == "error" and not told.error else told.error


def count_events(frames: bytes) -> int:
    """How many events with data there are in them, whether they came in one read or in several. Comments are none."""
    return sum(1 for _ in _DATA_LINE.finditer(frames))


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None


class _Failed(msgspec.Struct):
    error: Any = None
    object: Any = None  # "error", with its fields beside it, as older servers write it
    message: Any = None
    type: Any = None
    param: Any = None
    code: Any = None

    @property
    def told(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("message", "type", "param", "code")}


_event = msgspec.json.Decoder(_Event)
_failed = msgspec.json.Decoder(_Failed).decode
_DATA_LINE = re.compile(rb"(?:\A|[\r\n])data: ?([^\r\n]*)")


def event_data(frames: bytes) -> list[bytes]:
    """The data of each event in them, in order; empty for what is only a comment."""
    found: list[bytes] = []
    data: list[bytes] = []
    begun = False
    for line in frames.splitlines():
        if line:
            begun = True
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
        elif begun:
            found.append(b"\n".join(data))
            data, begun = [], False
    return [*found, b"\n".join(data)] if begun else found


def has_output(frames: bytes) -> bool:
    """Whether there is anything in them that a client waits for: text, a tool call, an end or an error.

    A comment, a role alone and empty text are none. What is not understood is taken for output.
    """
    lines = list(_DATA_LINE.finditer(frames))
    if not lines:
        return not frames.lstrip().startswith(b":")
    for line in lines:
        try:
            event = _event.decode(line[1])
        except _UNREADABLE:  # [DONE] too
            return True
        if event.error is not None or event.choices is None:
            return True
        for choice in event.choices:
            said = choice.delta or {}
            if choice.text or choice.finish_reason or any(value for name, value in said.items() if name != "role"):
                return True
    return False


class _Object(msgspec.Struct):
    """A JSON object of which nothing is wanted: its fields are skipped, and must still be JSON."""


_skim = msgspec.json.Decoder(_Object).decode
_UNREADABLE = (msgspec.MsgspecError, RecursionError)  # no JSON, or too deep
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r){2}")


def is_single_object_event(frames: bytes) -> bool:
    """Whether this is one event, of one JSON object on one line, and that no error: as nearly all that servers write,
    an event at a time. For half a microsecond; what is not is to be looked at closely, by the others here.
    """
    if (
        not frames.startswith(b"data: {")
        or not frames.endswith(b"\n\n")
        or frames.count(b"\n") != 2
        or frames.find(b"\r") >= 0  # which ends a line, too
        or frames.find(_ERROR) >= 0
    ):
        return False
    try:
        _skim(frames[6:])
    except _UNREADABLE:
        return False
    return True


def first_malformed_at(frames: bytes) -> int | None:
    """Where the first event begins whose data is neither a JSON object nor `[DONE]`; None where there is none."""
    begin = 0
    for end in [*(blank.end() for blank in _BLANK_LINE.finditer(frames)), len(frames)]:
        data = b"\n".join(line[1] for line in _DATA_LINE.finditer(frames[begin:end])).strip()
        if data and data != b"[DONE]":
            try:
                _skim(data)
            except _UNREADABLE:
                return begin
        begin = end
    return None
