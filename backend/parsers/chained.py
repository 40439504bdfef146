"""Chains the two parsers of an output: the reasoning parser first, then the tool call parser for the content."""

from __future__ import annotations

from backend.parsers.base import ContentText, OutputEvent, OutputParser
from backend.parsers.reasoning import ReasoningParser


class ChainedParser(OutputParser):
    """Passes text to a reasoning parser, and the content that it emits to a tool call parser. Either can be None.

    `calls_only`: a grammar forces calls. Then text beside them is markers, or a call that was cut off before its name
    was complete, and is not content.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, calls: OutputParser | None, *, calls_only: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._calls_only = calls_only and calls is not None

    @property
    def is_reasoning(self) -> bool:
        """Whether the output is still inside the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[OutputEvent]:
        return self._parse_calls(self._reasoning.push(text) if self._reasoning else [ContentText(text)])

    def finish(self) -> list[OutputEvent]:
        events = self._parse_calls(self._reasoning.finish() if self._reasoning else [])
        return events + self._kept(self._calls.finish() if self._calls else [])

    def _parse_calls(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if self._calls is None:
            return [event for event in events if not isinstance(event, ContentText) or event.text]
        parsed: list[OutputEvent] = []
        for event in events:
            parsed += self._kept(self._calls.push(event.text)) if isinstance(event, ContentText) else [event]
        return parsed

    def _kept(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if not self._calls_only:
            return events
        return [event for event in events if not isinstance(event, ContentText)]
