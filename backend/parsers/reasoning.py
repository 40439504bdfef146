"""The family of formats in which models think before they answer, and what every member promises."""

from __future__ import annotations

from abc import ABC, abstractmethod

from backend.parsers.base import MarkerTerminal, OutputParser

NO_REASONING_RULES = 'reasoning: ""\nopening: ""'  # the rules where none is to be expected


def rule_through(closer: str, terminal: MarkerTerminal) -> tuple[str, str]:
    """(what stands in a Lark rule for any text and the marker behind it, the rule which that needs)."""
    if terminal(closer).startswith('"'):
        return "through", f"through[suffix={terminal(closer)}]: /(?s:.*)/"
    return f"within {terminal(closer)}", "within: /(?s:.*)/"


class ReasoningParser(OutputParser):
    """Says what is `Reasoning`, and all else as `Text`: the answer, with the calls that stand in it."""

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the answer has not begun, so that what comes next is thought."""


class ReasoningFormat(ABC):
    """How one family of models thinks. `prompt` is the one that is answered, as rendered."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """What stands around thoughts; special tokens in some vocabularies."""

    @abstractmethod
    def parser(self, prompt: str) -> ReasoningParser: ...

    @abstractmethod
    def rules(self, prompt: str, terminal: MarkerTerminal) -> str:
        """Returns two Lark rules for what precedes the answer.

        `reasoning` matches the reasoning block before an answer or a tool call, or nothing. `opening` matches what
        precedes the text of an answer only.
        """
