"""Interface of tool call formats (`ToolFormat`) and output parsers (`OutputParser`), and the events that parsers emit.

A parser reads output incrementally. However the text is split into pieces, a parser must emit the same events, except
that consecutive texts can be split differently. A parser never retracts an event. So it must hold back text that can
still become part of a marker or a call, but no other text.

A `ToolFormat` is the syntax in which some models write tool calls. It provides the parser for this syntax, and the
grammar rules that force a model to use it.
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
    """Event: a piece of the output's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Event: a piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Event: a tool call begins, and its name is known. `index` is the number of the call within the output, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Event: the next piece of a tool call's arguments, which are JSON as the model wrote it."""

    index: int
    text: str


OutputEvent = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


class OutputParser(ABC):
    """Base class of parsers. A parser reads the output of one choice incrementally and emits events."""

    @abstractmethod
    def push(self, text: str) -> list[OutputEvent]:
        """Reads the next piece of text and returns the events that later text cannot change."""

    @abstractmethod
    def finish(self) -> list[OutputEvent]:
        """Marks the end of the output and returns the remaining events."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """Tool that the model may call in its output."""

    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: no arguments
    strict: bool = False


# Maps a marker to a terminal of a Lark grammar: its special token if the tokenizer has one, else its text.
MarkerTerminal = Callable[[str], str]


class ToolFormat(ABC):
    """Base class of tool call formats. A format is the syntax in which some models write tool calls."""

    markers: tuple[str, ...]  # delimiters of calls, which are special tokens in some vocabularies
    begins: str  # marker before the first call; empty if the format has none
    starts: ClassVar[str] = "{"  # first character of a call, if the format has no marker
    stands_alone: ClassVar[bool] = False  # whether an output with calls contains no text before the calls

    @abstractmethod
    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        """Returns a new parser for one output."""

    @abstractmethod
    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        """Returns two Lark rules: `head` matches the first marker, and `calls` the tool calls that follow it.

        `calls` matches one call of one of these tools, or several calls if `parallel` is true.
        """

    def unenforced(self, tool: CallableTool) -> list[str]:
        """Returns the parts of a tool's schema that the rules of `calls` cannot express, beside those of `%json`.

        They are refused if the tool is `strict`, and else ignored.
        """
        return []

    def new_id(self, name: str, number: int) -> str:
        """Returns an id for a call that the model's chat template accepts.

        `name` is the called function. `number` is the number of calls before this one in the conversation.
        """
        return f"call_{secrets.token_hex(12)}"


def parameters_rule(tool: CallableTool) -> str:
    """Returns the Lark rule for a tool's arguments."""
    schema = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return json_rule(schema, strict=tool.strict)


def named_call_rules(tools: Sequence[CallableTool], key: str) -> list[str]:
    """Returns the Lark rules `call_0`, `call_1` and so on: one call each as JSON, with its arguments under `key`."""
    rules: list[str] = []
    for i, tool in enumerate(tools):
        name = quoted(f'{{"name": {quoted(tool.name)}, "{key}": ')
        rules += [f'call_{i}: {name} arguments_{i} "}}"', f"arguments_{i}: {parameters_rule(tool)}"]
    return rules


def json_rule(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """Returns the Lark rule for JSON of a schema, with a space after commas and colons, as models write it.

    Unless `strict`, keywords that cannot be enforced are ignored.
    """
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def quoted(text: str) -> str:
    """Returns the text as a string literal of a Lark grammar."""
    return json.dumps(text)
