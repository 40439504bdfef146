"""What parsers of tool calls have in common: text up to a marker, and the way back when no call follows it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from backend.parsers.base import ContentText, OutputEvent, OutputParser, ToolCallStart
from backend.parsers.json_scanner import WHITESPACE, CallStage, JsonCallScanner


def partial_marker_length(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


class MarkerCallParser(OutputParser):
    """A machine whose states are methods: each takes what it can of `_rest`, and says whether it got any further.

    Spaces before a call, and at the end behind one, are no part of the text; so they are said when text follows them.
    """

    marker: str

    def __init__(self) -> None:
        self._state: Callable[[], bool] = self._read_text
        self._rest = ""  # not yet taken
        self._spaces = ""  # taken, and said if text follows
        self._tentative = ""  # taken, and said as text if no call comes of it
        self._num_calls = 0
        self._scanner = JsonCallScanner(0)
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> list[OutputEvent]:
        self._rest += text
        while self._rest and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[OutputEvent]:
        if self._num_calls and self._is_between_calls:
            self._tentative = self._rest = ""
        self._say(self._tentative + self._rest)
        self._tentative = self._rest = ""
        if not self._num_calls and self._spaces:
            self._events.append(ContentText(self._spaces))
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _behind_marker(self) -> bool:
        """The state that follows a marker."""

    def _read_text(self) -> bool:
        before, found, after = self._rest.partition(self.marker)
        if found:
            self._say(before)
            self._rest, self._tentative = after, found
            self._state = self._behind_marker
            return True
        end = len(before) - partial_marker_length(before, self.marker)
        self._say(before[:end])
        self._rest = before[end:]
        return False

    def _skip_spaces(self) -> bool:
        """Whether anything else is left."""
        stripped = self._rest.lstrip(WHITESPACE)
        self._tentative += self._rest[: len(self._rest) - len(stripped)]
        self._rest = stripped
        return bool(stripped)

    def _read_call(self) -> bool:
        """JSON, with a name and arguments."""
        events, taken = self._scanner.feed(self._rest)
        self._emit(events)
        if not self._scanner.started:
            self._tentative += self._rest[:taken]
        self._rest = self._rest[taken:]
        if self._scanner.stage is CallStage.DONE:
            self._state = self._behind_call
        elif self._scanner.stage is CallStage.REJECTED:
            self._give_up()
        return self._scanner.ended

    @property
    def _is_between_calls(self) -> bool:
        return self._state in (self._behind_call, self._behind_marker) or (
            self._state == self._read_call and self._scanner.stage is CallStage.OPENING
        )

    @abstractmethod
    def _behind_call(self) -> bool:
        """The state that follows a call."""

    def _begin_call(self, names: frozenset[str] | None = None) -> bool:
        self._scanner = JsonCallScanner(self._num_calls, names)
        self._state = self._read_call
        return True

    def _give_up(self) -> bool:
        """It was text after all."""
        said, self._tentative = self._tentative, ""
        self._say(said)
        self._state = self._read_text
        return True

    def _emit(self, events: list[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, ToolCallStart):
                self._num_calls += 1
                self._spaces = self._tentative = ""
        self._events += events

    def _say(self, text: str) -> None:
        text = self._spaces + text
        said = text.rstrip(WHITESPACE)
        self._spaces = text[len(said) :]
        if said:
            self._events.append(ContentText(said))
