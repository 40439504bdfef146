"""Base class of tool call parsers for formats in which a marker precedes the calls.

The parser is a state machine that reads text up to a marker, then calls, and text again if no call follows the marker.
`_rest` is input that has not been consumed. `_tentative` is input that was consumed after a marker. It becomes content
if it is not a call after all. A subclass sets `openings` and defines what follows a marker and a call. `_read_call`
reads a call in JSON, name included. `_start_call` and `_read_arguments` read a call whose name precedes its JSON.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from backend.parsers.base import ContentText, OutputEvent, OutputParser, ToolCallArguments, ToolCallStart
from backend.parsers.json_scanner import WHITESPACE, CallStage, JsonCallScanner, JsonValueScanner


def partial_marker_length(text: str, marker: str) -> int:
    """Returns the length of the longest suffix of the text that is a proper prefix of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


class MarkerCallParser(OutputParser):
    """Parser of tool calls after a marker: a state machine whose states are methods.

    A state consumes input from `_rest` and returns whether the next state can run. Whitespace before a call or between
    a call and the end of the output is not content. So whitespace is emitted only when content follows it.
    """

    openings: tuple[str, ...]  # the markers that can precede calls

    def __init__(self) -> None:
        self._state: Callable[[], bool] = self._read_text
        self._rest = ""  # not consumed yet
        self._whitespace = ""  # consumed whitespace, emitted if content follows
        self._tentative = ""  # consumed, emitted as content if it is not a call
        self._num_calls = 0
        self._opening = ""  # the last marker that was read
        self._value = JsonValueScanner()
        self._scanner = JsonCallScanner(0)
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> list[OutputEvent]:
        self._rest += text
        while self._rest and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[OutputEvent]:
        # After a call, an unfinished marker or separator at the end is not content.
        if self._num_calls and self._is_between_calls:
            self._tentative = self._rest = ""
        self._emit_content(self._tentative + self._rest)
        self._tentative = self._rest = ""
        if not self._num_calls and self._whitespace:
            self._events.append(ContentText(self._whitespace))
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _after_marker(self) -> bool:
        """Reads what follows a marker. State method: returns whether the next state can run."""

    def _read_text(self) -> bool:
        found = [(at, opening) for opening in self.openings if (at := self._rest.find(opening)) >= 0]
        if found:
            at, self._opening = min(found)
            self._emit_content(self._rest[:at])
            self._rest, self._tentative = self._rest[at + len(self._opening) :], self._opening
            self._state = self._after_marker
            return True
        end = len(self._rest) - max(partial_marker_length(self._rest, opening) for opening in self.openings)
        self._emit_content(self._rest[:end])
        self._rest = self._rest[end:]
        return False

    def _skip_whitespace(self) -> bool:
        """Consumes whitespace and returns whether any input is left."""
        stripped = self._rest.lstrip(WHITESPACE)
        self._tentative += self._rest[: len(self._rest) - len(stripped)]
        self._rest = stripped
        return bool(stripped)

    def _read_call(self) -> bool:
        """Reads a call in JSON with a name and arguments. State method."""
        events, taken = self._scanner.feed(self._rest)
        self._emit(events)
        if not self._scanner.started:
            self._tentative += self._rest[:taken]
        self._rest = self._rest[taken:]
        if self._scanner.stage is CallStage.DONE:
            self._state = self._after_call
        elif self._scanner.stage is CallStage.REJECTED:
            self._give_up()
        return self._scanner.ended

    @property
    def _is_between_calls(self) -> bool:
        return self._state in (self._after_call, self._after_marker) or (
            self._state == self._read_call and self._scanner.stage is CallStage.OPENING
        )

    @abstractmethod
    def _after_call(self) -> bool:
        """Reads what follows a call. State method: returns whether the next state can run."""

    def _start_call(self, name: str) -> bool:
        """Starts a call whose name was read. Its arguments in JSON follow."""
        self._emit([ToolCallStart(self._num_calls, name)])
        self._value = JsonValueScanner()
        self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        """Reads the arguments of a call as JSON. State method."""
        end = self._value.feed(self._rest, 0)
        self._emit([ToolCallArguments(self._num_calls - 1, self._rest[:end])])
        self._rest = self._rest[end:]
        if self._value.done:
            self._state = self._after_call
        return self._value.done

    def _begin_call(self, names: frozenset[str] | None = None) -> bool:
        self._scanner = JsonCallScanner(self._num_calls, names)
        self._state = self._read_call
        return True

    def _give_up(self) -> bool:
        """Emits the tentative input as content, because it is not a call."""
        text, self._tentative = self._tentative, ""
        self._emit_content(text)
        self._state = self._read_text
        return True

    def _emit(self, events: list[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, ToolCallStart):
                self._num_calls += 1
                self._whitespace = self._tentative = ""
        self._events += events

    def _emit_content(self, text: str) -> None:
        text = self._whitespace + text
        content = text.rstrip(WHITESPACE)
        self._whitespace = text[len(content) :]
        if content:
            self._events.append(ContentText(content))
