"""An answer's parsers one behind the other: reasoning first, and tool calls in what is not reasoning."""

from __future__ import annotations

from backend.parsers.base import Event, OutputParser, Text
from backend.parsers.reasoning import ReasoningParser


class ReplyParser(OutputParser):
    def __init__(self, thinking: ReasoningParser | None, calls: OutputParser | None) -> None:
        self._thinking = thinking
        self._calls = calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer has not begun, so that what has come is thought."""
        return self._thinking is not None and self._thinking.is_reasoning

    def push(self, text: str) -> list[Event]:
        return self._through_calls(self._thinking.push(text) if self._thinking else [Text(text)])

    def finish(self) -> list[Event]:
        events = self._through_calls(self._thinking.finish() if self._thinking else [])
        return events + (self._calls.finish() if self._calls else [])

    def _through_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return [event for event in events if not isinstance(event, Text) or event.text]
        through: list[Event] = []
        for event in events:
            through += self._calls.push(event.text) if isinstance(event, Text) else [event]
        return through
