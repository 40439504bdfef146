"""Reasoning format in which two markers, such as `<think>` and `</think>`, enclose reasoning before the content.

Line breaks next to the markers are part of neither the reasoning nor the content, because chat templates strip them
from earlier outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.parsers.base import ContentText, MarkerTerminal, OutputEvent, ReasoningText
from backend.parsers.marker_calls import partial_marker_length
from backend.parsers.reasoning import NO_REASONING_RULES, ReasoningFormat, ReasoningParser, rule_through


@dataclass(frozen=True, slots=True)
class DelimitedReasoningFormat(ReasoningFormat):
    """Format of reasoning between the markers `opens` and `closes`."""

    opens: str
    closes: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opens, self.closes)

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends inside the reasoning. Some chat templates end with the first marker."""
        return prompt.rstrip().endswith(self.opens)

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with a closed reasoning block, so that the output has none."""
        return prompt.rstrip().endswith(self.closes)

    def parser(self, prompt: str) -> DelimitedReasoningParser:
        return DelimitedReasoningParser(self, is_open=self.is_open(prompt))

    def rules(self, prompt: str, terminal: MarkerTerminal) -> str:
        if self.is_closed(prompt):
            return NO_REASONING_RULES
        body, rule = rule_through(self.closes, terminal)
        reasoning = f"{body} BREAKS" if self.is_open(prompt) else f"({terminal(self.opens)} {body} BREAKS)?"
        return "\n".join([f"reasoning: {reasoning}", r"BREAKS: /\n{0,2}/", 'opening: ""', rule])


class DelimitedReasoningParser(ReasoningParser):
    """Parser of one output. If `is_open` is true, the output begins inside the reasoning."""

    def __init__(self, markers: DelimitedReasoningFormat, *, is_open: bool) -> None:
        self._markers = markers
        self._started = is_open  # whether the first marker has been read
        self._ended = False
        self._rest = ""
        self._pending_breaks = ""  # line breaks at the end, emitted only if more reasoning follows
        self._emitted = False  # whether the current part (reasoning or content) has emitted text
        self._events: list[OutputEvent] = []

    @property
    def is_reasoning(self) -> bool:
        return self._started and not self._ended

    def push(self, text: str) -> list[OutputEvent]:
        self._rest += text
        if not self._started and not self._ended:
            self._find_start()
        if self._started and not self._ended:
            self._read_reasoning()
        if self._ended:
            self._read_content()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[OutputEvent]:
        if not self._rest:
            return []
        return (
            [ReasoningText(self._pending_breaks + self._rest)]
            if self._started and not self._ended
            else [ContentText(self._rest)]
        )

    def _find_start(self) -> None:
        stripped = self._rest.lstrip()
        if stripped.startswith(self._markers.opens):
            self._started = True
            self._rest = stripped[len(self._markers.opens) :]
        elif not self._markers.opens.startswith(stripped):
            self._ended = self._emitted = True  # no reasoning: keep the content unstripped

    def _read_reasoning(self) -> None:
        before, found, after = self._rest.partition(self._markers.closes)
        end = len(before) if found else len(before) - partial_marker_length(before, self._markers.closes)
        text = before[:end] if self._emitted else before[:end].lstrip("\n")
        complete = (self._pending_breaks + text).rstrip("\n")
        self._pending_breaks = (self._pending_breaks + text)[len(complete) :]
        self._emitted = self._emitted or bool(complete)
        if complete:
            self._events.append(ReasoningText(complete))
        self._rest = after if found else before[end:]
        if found:
            self._ended, self._emitted, self._pending_breaks = True, False, ""

    def _read_content(self) -> None:
        if not self._emitted:
            self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._emitted = True
            self._events.append(ContentText(self._rest))
            self._rest = ""
