"""Interface of reasoning formats. A format is the syntax in which models write reasoning before the content."""

from __future__ import annotations

from abc import ABC, abstractmethod

from backend.parsers.base import MarkerTerminal, OutputParser

NO_REASONING_RULES = 'reasoning: ""\nopening: ""'  # Lark rules for an output without reasoning


def rule_through(closer: str, terminal: MarkerTerminal) -> tuple[str, str]:
    """Returns a Lark expression for any text up to and including the marker `closer`, and a rule that it refers to."""
    if terminal(closer).startswith('"'):
        return "through", f"through[suffix={terminal(closer)}]: /(?s:.*)/"
    return f"within {terminal(closer)}", "within: /(?s:.*)/"


class ReasoningParser(OutputParser):
    """Base class of reasoning parsers, which split output into `ReasoningText` and `ContentText`.

    The content still contains the tool calls.
    """

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the output is still inside the reasoning."""


class ReasoningFormat(ABC):
    """Base class of reasoning formats. `prompt` is the text of the prompt, after the chat template."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """The delimiters of the reasoning. Some vocabularies have them as special tokens."""

    @abstractmethod
    def parser(self, prompt: str) -> ReasoningParser:
        """Returns a new parser for one output."""

    @abstractmethod
    def rules(self, prompt: str, terminal: MarkerTerminal) -> str:
        """Returns the Lark rules `reasoning` and `opening`, for the output before the answer.

        `reasoning` matches the reasoning block before an answer or a tool call. It can match nothing. `opening` matches
        markers between the reasoning and the text of an answer. No `opening` precedes a tool call.
        """
