"""Reasoning between two markers, before the answer.

Line breaks next to the markers belong to neither, as chat templates strip them when they print an earlier answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.parsers.base import ContentText, MarkerTerminal, OutputEvent, ReasoningText
from backend.parsers.marker_calls import partial_marker_length
from backend.parsers.reasoning import NO_REASONING_RULES, ReasoningFormat, ReasoningParser, rule_through


@dataclass(frozen=True, slots=True)
class DelimitedReasoningFormat(ReasoningFormat):
    opens: str
    closes: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opens, self.closes)

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends within reasoning: some templates write the first marker themselves."""
        return prompt.rstrip().endswith(self.opens)

    def is_over(self, prompt: str) -> bool:
        """Whether the prompt ends with reasoning that is closed already, so that none will come."""
        return prompt.rstrip().endswith(self.closes)

    def parser(self, prompt: str) -> DelimitedReasoningParser:
        return DelimitedReasoningParser(self, is_open=self.is_open(prompt))

    def rules(self, prompt: str, terminal: MarkerTerminal) -> str:
        if self.is_over(prompt):
            return NO_REASONING_RULES
        body, rule = rule_through(self.closes, terminal)
        reasoning = f"{body} BREAKS" if self.is_open(prompt) else f"({terminal(self.opens)} {body} BREAKS)?"
        return "\n".join([f"reasoning: {reasoning}", r"BREAKS: /\n{0,2}/", 'opening: ""', rule])


class DelimitedReasoningParser(ReasoningParser):
    def __init__(self, markers: DelimitedReasoningFormat, *, is_open: bool) -> None:
        self._markers = markers
        self._begun = is_open  # known to be reasoning, or not
        self._over = False
        self._rest = ""
        self._breaks = ""  # said if more reasoning follows
        self._said = False  # something of the part that is being read
        self._events: list[OutputEvent] = []

    @property
    def is_reasoning(self) -> bool:
        return self._begun and not self._over

    def push(self, text: str) -> list[OutputEvent]:
        self._rest += text
        if not self._begun and not self._over:
            self._look_for_reasoning()
        if self._begun and not self._over:
            self._read_reasoning()
        if self._over:
            self._read_answer()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[OutputEvent]:
        if not self._rest:
            return []
        return (
            [ReasoningText(self._breaks + self._rest)] if self._begun and not self._over else [ContentText(self._rest)]
        )

    def _look_for_reasoning(self) -> None:
        stripped = self._rest.lstrip()
        if stripped.startswith(self._markers.opens):
            self._begun = True
            self._rest = stripped[len(self._markers.opens) :]
        elif not self._markers.opens.startswith(stripped):
            self._over = self._said = True  # there is none, and nothing of the answer is to be stripped

    def _read_reasoning(self) -> None:
        before, found, after = self._rest.partition(self._markers.closes)
        end = len(before) if found else len(before) - partial_marker_length(before, self._markers.closes)
        text = before[:end] if self._said else before[:end].lstrip("\n")
        said = (self._breaks + text).rstrip("\n")
        self._breaks = (self._breaks + text)[len(said) :]
        self._said = self._said or bool(said)
        if said:
            self._events.append(ReasoningText(said))
        self._rest = after if found else before[end:]
        if found:
            self._over, self._said, self._breaks = True, False, ""

    def _read_answer(self) -> None:
        if not self._said:
            self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._said = True
            self._events.append(ContentText(self._rest))
            self._rest = ""
