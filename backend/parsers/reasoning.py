"""The family of formats in which models think before they answer, and what every member promises."""

from __future__ import annotations

from abc import ABC, abstractmethod

from backend.parsers.base import Mark, OutputParser

NO_THOUGHT = 'thinking: ""\nopening: ""'  # the rules where none is to be expected


def up_to(closer: str, mark: Mark) -> tuple[str, str]:
    """(what stands in a Lark rule for any text and the marker behind it, the rule which that needs)."""
    if mark(closer).startswith('"'):
        return "through", f"through[suffix={mark(closer)}]: /(?s:.*)/"
    return f"within {mark(closer)}", "within: /(?s:.*)/"


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
    def rules(self, prompt: str, mark: Mark) -> str:
        """Lark rules: `thinking` is what comes before an answer or a call, or nothing; `opening`, what comes before the
        text of an answer in particular.
        """
