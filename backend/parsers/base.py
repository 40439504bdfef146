"""The family of formats in which models write tool calls, and what every member promises.

A parser reads an answer as it grows. What it has said after some text is a function of that text alone: however the
text was cut into pieces, the texts, names and arguments of its events come to the same. It never takes back what it
has said, so it holds back what may still turn out to be something else, and no more than that.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

MAX_PARALLEL_CALLS = 32  # that a grammar lets a model make in one answer


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """`index`: of the call within the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments, JSON as the model wrote it."""

    index: int
    text: str


OutputEvent = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


class OutputParser(ABC):
    """Reads one answer."""

    @abstractmethod
    def push(self, text: str) -> list[OutputEvent]:
        """What is certain now."""

    @abstractmethod
    def finish(self) -> list[OutputEvent]:
        """The rest, when no more text comes."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: no arguments
    strict: bool = False


# A special token or plain text as a terminal of a Lark grammar, whichever the tokenizer has for this marker.
MarkerTerminal = Callable[[str], str]


class ToolFormat(ABC):
    """How one family of models writes its calls."""

    markers: ClassVar[tuple[str, ...]]  # what stands around calls; special tokens in some vocabularies
    begins: ClassVar[str]  # the marker before the first call
    stands_alone: ClassVar[bool] = False  # whether no text can come before it

    @abstractmethod
    def parser(self, tools: Sequence[CallableTool]) -> OutputParser: ...

    @abstractmethod
    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        """Lark rules: `calls` is one call of these tools or more, behind the first marker; `head` is that marker."""

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


def parameters_rule(tool: CallableTool) -> str:
    """The arguments of one tool, for a Lark rule: JSON with the spaces that models are used to."""
    schema = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def quoted(text: str) -> str:
    """A literal of a Lark grammar."""
    return json.dumps(text)
