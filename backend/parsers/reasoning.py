"""Interface of reasoning formats: how models write reasoning before their output's content."""

from __future__ import annotations

from abc import ABC, abstractmethod

from backend.parsers.base import MarkerTerminal, OutputParser

NO_REASONING_RULES = 'reasoning: ""\nopening: ""'  # the rules if the output has no reasoning


def rule_through(closer: str, terminal: MarkerTerminal) -> tuple[str, str]:
    """Returns a Lark expression for any text up to and including the marker, and the rule that it refers to."""
    if terminal(closer).startswith('"'):
        return "through", f"through[suffix={terminal(closer)}]: /(?s:.*)/"
    return f"within {terminal(closer)}", "within: /(?s:.*)/"


class ReasoningParser(OutputParser):
    """Splits output into `ReasoningText` and `ContentText`. The content still contains the tool calls."""

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the output is still inside the reasoning."""


class ReasoningFormat(ABC):
    """The way in which one family of models writes reasoning. `prompt` is the rendered prompt of the output."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Delimiters of the reasoning; special tokens in some vocabularies."""

    @abstractmethod
    def parser(self, prompt: str) -> ReasoningParser:
        """Returns a new parser for one output."""

    @abstractmethod
    def rules(self, prompt: str, terminal: MarkerTerminal) -> str:
        """Returns two Lark rules for what precedes the answer.

        `reasoning` matches the reasoning block before an answer or a tool call, or nothing. `opening` matches what
        precedes the text of an answer only.
        """
