r"""Tool calls of GLM 4.5 and later: the name, then keys and values between tags, with the values as text.

<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from backend.parsers.base import CallableTool, MarkerTerminal, OutputParser, quoted
from backend.parsers.tagged_calls import MAX_HEAD_CHARACTERS, TaggedCallParser, TaggedFormat, value_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_CLOSES = "<arg_key>", "</arg_key>"
VALUE, VALUE_CLOSES = "<arg_value>", "</arg_value>"

_HEAD = re.compile(rf"\s*([^\s<>{{}}\[\]]+)\s*(?={KEY}|{CLOSE})")
_MAYBE_HEAD = re.compile(r"\s*[^\s<>{}\[\]]*\s*(<[/a-z_]*)?")


class GlmFormat(TaggedFormat):
    """Format of keys and values between tags."""

    markers = (OPEN, CLOSE, KEY, KEY_CLOSES, VALUE, VALUE_CLOSES)
    begins = OPEN

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return GlmParser(tools)

    def call_rule(self, name: str, arguments: str, terminal: MarkerTerminal) -> str:
        return f"{quoted(name + chr(10))} {arguments} {terminal(CLOSE)}"

    def argument_rules(
        self, rule: str, key: str, schema: Mapping[str, Any], terminal: MarkerTerminal, *, strict: bool
    ) -> list[str]:
        closing = terminal(VALUE_CLOSES)
        is_special = not closing.startswith('"')
        value, rules = value_rules(f"{rule}_value", schema, closing, is_special=is_special, strict=strict)
        opening = f'{terminal(KEY)} {quoted(key)} {terminal(KEY_CLOSES)} "\\n" {terminal(VALUE)}'
        return [f'{rule}: {opening} {value} "\\n"', *rules]


class GlmParser(TaggedCallParser):
    """Parser of one output with keys and values between tags."""

    openings = (OPEN,)
    key_opens, key_closes = KEY, KEY_CLOSES
    value_opens, value_closes = VALUE, VALUE_CLOSES
    arguments_close = CLOSE
    trims = False

    def _after_marker(self) -> bool:
        if found := _HEAD.match(self._rest):
            self._rest = self._rest[found.end() :]
            return self._start_tagged(found[1])
        waits = _MAYBE_HEAD.fullmatch(self._rest) is not None and len(self._rest) < MAX_HEAD_CHARACTERS
        return False if waits else self._give_up()

    def _after_call(self) -> bool:
        self._tentative = ""
        self._state = self._read_text
        return True
