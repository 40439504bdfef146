"""An answer's parsers one behind the other: reasoning first, and tool calls in what is not reasoning."""

from __future__ import annotations

from backend.parsers.base import ContentText, OutputEvent, OutputParser
from backend.parsers.reasoning import ReasoningParser


class ChainedParser(OutputParser):
    def __init__(self, reasoning: ReasoningParser | None, calls: OutputParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer has not begun, so that what has come is thought."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[OutputEvent]:
        return self._through_calls(self._reasoning.push(text) if self._reasoning else [ContentText(text)])

    def finish(self) -> list[OutputEvent]:
        events = self._through_calls(self._reasoning.finish() if self._reasoning else [])
        return events + (self._calls.finish() if self._calls else [])

    def _through_calls(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if self._calls is None:
            return [event for event in events if not isinstance(event, ContentText) or event.text]
        through: list[OutputEvent] = []
        for event in events:
            through += self._calls.push(event.text) if isinstance(event, ContentText) else [event]
        return through
