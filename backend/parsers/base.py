"""Interface of tool call formats and output parsers, and the events that parsers emit.

A parser reads output incrementally. Its events after some text depend on that text alone: they are the same, joined,
however the text was split into pieces. A parser never retracts an event, so it holds back text that can still turn
out to be part of a marker or call, and no more than that.

A `ToolFormat` is one model family's way to write tool calls. It provides the parser, and the grammar rules that force
a model to write calls in that format.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

MAX_PARALLEL_CALLS = 32  # calls per output that a grammar allows


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the output's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call whose name is known. `index` is its number within the output, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments: JSON as the model wrote it."""

    index: int
    text: str


OutputEvent = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


class OutputParser(ABC):
    """Parses the output of one choice incrementally."""

    @abstractmethod
    def push(self, text: str) -> list[OutputEvent]:
        """Takes more text and returns the events that are certain now."""

    @abstractmethod
    def finish(self) -> list[OutputEvent]:
        """Ends the output and returns the remaining events."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the output may call."""

    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: no arguments
    strict: bool = False


# Maps a marker to a terminal of a Lark grammar: its special token if the tokenizer has one, else its text.
MarkerTerminal = Callable[[str], str]


class ToolFormat(ABC):
    """The way in which one family of models writes tool calls."""

    markers: ClassVar[tuple[str, ...]]  # delimiters of calls; special tokens in some vocabularies
    begins: ClassVar[str]  # marker before the first call; empty if the format has none
    stands_alone: ClassVar[bool] = False  # whether an output with calls has no text before them

    @abstractmethod
    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        """Returns a new parser for one output."""

    @abstractmethod
    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        """Returns Lark rules: `head` is the first marker, `calls` is one call of these tools or more, after it."""

    def new_id(self) -> str:
        """Returns a random call id that the model's chat template accepts."""
        return f"call_{secrets.token_hex(12)}"


def parameters_rule(tool: CallableTool) -> str:
    """Lark rule for the arguments of a tool: JSON with a space after commas and colons, as models write it."""
    schema = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def quoted(text: str) -> str:
    """A string literal in a Lark grammar."""
    return json.dumps(text)
