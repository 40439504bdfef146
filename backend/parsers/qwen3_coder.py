r"""Tool calls of Qwen3-Coder: a function and its parameters between tags, with the values as text.

    <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>

Some outputs begin with `<function=` and have no `<tool_call>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from backend.parsers.base import CallableTool, MarkerTerminal, OutputParser, quoted
from backend.parsers.tagged_calls import MAX_HEAD_CHARACTERS, TaggedCallParser, TaggedFormat, value_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_CLOSES = "<function=", "</function>"
PARAMETER, PARAMETER_CLOSES = "<parameter=", "</parameter>"

_HEAD = re.compile(r"\s*<function=\s*([^\s<>]+)\s*>")
_MAYBE_HEAD = re.compile(r"\s*(<|<[a-z]{1,8}|<function=\s*[^\s<>]*\s*)?")
_NAME = re.compile(r"\s*([^\s<>]+)\s*>")
_MAYBE_NAME = re.compile(r"\s*[^\s<>]*\s*")


class Qwen3CoderFormat(TaggedFormat):
    """Format of functions and parameters between tags."""

    markers = (OPEN, CLOSE)
    begins = OPEN

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return Qwen3CoderParser(tools)

    def call_rule(self, name: str, arguments: str, terminal: MarkerTerminal) -> str:
        opening, closing = quoted(f"\n{FUNCTION}{name}>\n"), quoted(f"{FUNCTION_CLOSES}\n")
        return f"{opening} {arguments} {closing} {terminal(CLOSE)}"

    def argument_rules(
        self, rule: str, key: str, schema: Mapping[str, Any], terminal: MarkerTerminal, *, strict: bool
    ) -> list[str]:
        closing = quoted(f"\n{PARAMETER_CLOSES}\n")
        value, rules = value_rules(f"{rule}_value", schema, closing, is_special=False, strict=strict)
        return [f"{rule}: {quoted(f'{PARAMETER}{key}>' + chr(10))} {value}", *rules]


class Qwen3CoderParser(TaggedCallParser):
    """Parser of one output with functions and parameters between tags."""

    openings = (OPEN, FUNCTION)
    key_opens, key_closes = PARAMETER, ">"
    value_opens, value_closes = "", PARAMETER_CLOSES
    arguments_close = FUNCTION_CLOSES
    trims = True

    def _after_marker(self) -> bool:
        head, maybe = (_HEAD, _MAYBE_HEAD) if self._opening == OPEN else (_NAME, _MAYBE_NAME)
        if found := head.match(self._rest):
            self._rest = self._rest[found.end() :]
            return self._start_tagged(found[1])
        waits = maybe.fullmatch(self._rest) is not None and len(self._rest) < MAX_HEAD_CHARACTERS
        return False if waits else self._give_up()

    def _after_call(self) -> bool:
        if not self._skip_whitespace():
            return False
        if CLOSE.startswith(self._rest) and self._rest != CLOSE:
            return False
        if not self._rest.startswith(CLOSE):
            return self._give_up()
        self._rest = self._rest.removeprefix(CLOSE)
        self._tentative = ""
        self._state = self._read_text
        return True
