"""Incremental scanners for JSON that a model is still writing.

`JsonValueScanner` finds where a value ends. `JsonCallScanner` reads a tool call and emits its name and arguments as
soon as they are known. It emits arguments as the model wrote them, without validation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from enum import Enum, auto

from backend.parsers.base import OutputEvent, ToolCallArguments, ToolCallStart

WHITESPACE = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class JsonValueScanner:
    """Finds the end of one JSON value. It looks at brackets and quotes only."""

    def __init__(self) -> None:
        self.done = False
        self._started_value = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def feed(self, text: str, start: int) -> int:
        """Returns the index in `text` at which the value ends, or the text's length if the value is not complete."""
        at = start
        while at < len(text) and not self.done:
            if not self._started_value:
                self._started_value = True
                self._scalar = text[at] not in '"{['
            if self._scalar:
                at = self._scan_scalar(text, at)
            elif self._in_string:
                at = self._scan_string(text, at)
            else:
                at = self._scan_structure(text, at)
        return at

    def _scan_scalar(self, text: str, at: int) -> int:
        end = _SCALAR_END.search(text, at)
        self.done = end is not None
        return end.start() if end else len(text)

    def _scan_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _STRING.search(text, at)
        if found is None:
            return len(text)
        self._escaped = found[0] == "\\"
        self._in_string = self._escaped
        self.done = not self._in_string and self._depth == 0
        return found.end()

    def _scan_structure(self, text: str, at: int) -> int:
        found = _STRUCTURE.search(text, at)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.done = self._depth == 0
        return found.end()


class CallStage(Enum):
    """Position of a `JsonCallScanner` within a tool call."""

    OPENING = auto()  # before the brace
    KEY = auto()  # before a key, or the closing brace
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    DONE = auto()
    REJECTED = auto()  # not a call


class JsonCallScanner:
    """Reads `{"name": "f", "arguments": {...}}`, with keys in either order. "parameters" is a synonym of "arguments".

    Input without a valid name is rejected. Once the name is known, the input counts as a call, whatever follows.
    """

    def __init__(self, index: int, names: Container[str] | None = None) -> None:
        """`index` is the number of the call in the emitted events. `names` are the accepted names. None accepts any."""
        self.stage = CallStage.OPENING
        self.started = False
        self._index = index
        self._names = names
        self._scanner = JsonValueScanner()
        self._key = ""
        self._value = ""
        self._arguments = ""  # read before the name
        self._has_arguments = False

    @property
    def ended(self) -> bool:
        return self.stage in (CallStage.DONE, CallStage.REJECTED)

    def feed(self, text: str) -> tuple[list[OutputEvent], int]:
        """Returns events and the number of characters consumed, which is all of them unless the call ends earlier."""
        events: list[OutputEvent] = []
        at = 0
        while at < len(text) and not self.ended:
            at = self._advance(text, at, events)
        return _merged(events), at

    def _advance(self, text: str, at: int, events: list[OutputEvent]) -> int:
        character = text[at]
        if self.stage in (CallStage.IN_KEY, CallStage.IN_VALUE):
            end = self._scanner.feed(text, at)
            self._take(text[at:end], events)
            return end
        if character in WHITESPACE or (character == "," and self.stage is CallStage.KEY):
            return at + 1
        if self.stage is CallStage.OPENING:
            self.stage = CallStage.KEY if character == "{" else CallStage.REJECTED
            return at + 1
        if self.stage is CallStage.COLON:
            self.stage = CallStage.VALUE if character == ":" else CallStage.REJECTED
            return at + 1
        if self.stage is CallStage.KEY and character == "}":
            self._close(events)
            return at + 1
        if self.stage is CallStage.KEY and character != '"':
            self.stage = CallStage.REJECTED
            return at + 1
        self._scanner = JsonValueScanner()
        self._value = ""
        self.stage = CallStage.IN_KEY if self.stage is CallStage.KEY else CallStage.IN_VALUE
        return at

    def _take(self, piece: str, events: list[OutputEvent]) -> None:
        """Processes the next piece of a key or value."""
        is_arguments = self.stage is CallStage.IN_VALUE and self._key in ("arguments", "parameters")
        self._value += piece
        # Arguments in an object are emitted while they arrive. A string with JSON must be complete to be decoded.
        is_streamed = is_arguments and self._value.startswith("{")
        if is_streamed:
            self._emit_arguments(piece, events)
        if not self._scanner.done:
            return
        if self.stage is CallStage.IN_KEY:
            self._key, self.stage = str(_parse_json(self._value)), CallStage.COLON
            return
        self.stage = CallStage.KEY
        if self._key == "name":
            self._start(_parse_json(self._value), events)
        elif is_arguments and not is_streamed:
            # Some models write the arguments as a string that contains JSON, or as `null` if there are none.
            decoded = _parse_json(self._value)
            self._emit_arguments(decoded if isinstance(decoded, str) else "{}", events)

    def _emit_arguments(self, text: str, events: list[OutputEvent]) -> None:
        self._has_arguments = True
        if self.started:
            events.append(ToolCallArguments(self._index, text))
        else:
            self._arguments += text

    def _start(self, name: object, events: list[OutputEvent]) -> None:
        if self.started:
            return
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            self.stage = CallStage.REJECTED
            return
        self.started = True
        events.append(ToolCallStart(self._index, name))
        if self._arguments:
            events.append(ToolCallArguments(self._index, self._arguments))

    def _close(self, events: list[OutputEvent]) -> None:
        self.stage = CallStage.DONE if self.started else CallStage.REJECTED
        if self.started and not self._has_arguments:
            events.append(ToolCallArguments(self._index, "{}"))


def _parse_json(raw: str) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _merged(events: list[OutputEvent]) -> list[OutputEvent]:
    """Merges adjacent argument events of one call."""
    merged: list[OutputEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            merged[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
