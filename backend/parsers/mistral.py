"""Tool calls of Mistral: `[TOOL_CALLS]`, then `[{"name": "f", "arguments": {...}}, ...]` or `f[ARGS]{...}`.

In the first form, the marker `[TOOL_CALLS]` precedes a list of calls. In the second form, it precedes each call. Models
with tokenizer version 11 or later write the second form, some of them without `[ARGS]`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from backend.parsers.base import (
    MAX_PARALLEL_CALLS,
    CallableTool,
    MarkerTerminal,
    OutputParser,
    ToolCallArguments,
    ToolCallStart,
    ToolFormat,
    parameters_rule,
    quoted,
)
from backend.parsers.json_scanner import JsonValueScanner
from backend.parsers.marker_calls import MarkerCallParser

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # Mistral's chat templates reject any other id

_HEAD = re.compile(r"([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAYBE_HEAD = re.compile(r"[A-Za-z0-9_.\-\s\[\]]*")
MAX_HEAD_CHARACTERS = 256


class MistralFormat(ToolFormat):
    """Format of calls after `[TOOL_CALLS]`, as a JSON list or one by one. The grammar allows only the list."""

    markers = (OPEN, ARGUMENTS, CALL_ID)
    begins = OPEN

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return MistralParser()

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        rules = [
            f"head: {terminal(OPEN)}",
            f'calls: "[" call{f" (SEPARATOR call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""} "]"',
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            'SEPARATOR: ", "',
        ]
        for i, tool in enumerate(tools):
            name = quoted(f'{{"name": {quoted(tool.name)}, "arguments": ')
            rules += [f'call_{i}: {name} arguments_{i} "}}"', f"arguments_{i}: {parameters_rule(tool)}"]
        return "\n".join(rules)

    def new_id(self) -> str:
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


class MistralParser(MarkerCallParser):
    """Parser of one output with calls after `[TOOL_CALLS]`, as a JSON list or one by one."""

    marker = OPEN

    def __init__(self) -> None:
        super().__init__()
        self._in_list = False
        self._value = JsonValueScanner()

    def _after_marker(self) -> bool:
        if not self._skip_whitespace():
            return False
        self._in_list = self._rest[0] == "["
        if self._in_list:
            self._tentative += "["
            self._rest = self._rest[1:]
        if self._in_list or self._rest.startswith("{"):
            return self._begin_call()
        self._state = self._read_head
        return True

    def _read_head(self) -> bool:
        head = _HEAD.match(self._rest)
        if head is None:
            maybe = _MAYBE_HEAD.fullmatch(self._rest) is not None and len(self._rest) < MAX_HEAD_CHARACTERS
            return False if maybe else self._give_up()
        self._emit([ToolCallStart(self._num_calls, head[1])])
        self._rest = self._rest[head.end() :]
        self._value = JsonValueScanner()
        self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        end = self._value.feed(self._rest, 0)
        self._emit([ToolCallArguments(self._num_calls - 1, self._rest[:end])])
        self._rest = self._rest[end:]
        if self._value.done:
            self._state = self._read_text
        return self._value.done

    def _after_call(self) -> bool:
        if not self._in_list:
            self._state = self._read_text
            return True
        if not self._skip_whitespace():
            return False
        if self._rest[0] == ",":
            self._tentative += ","
            self._rest = self._rest[1:]
            return self._begin_call()
        self._rest = self._rest.removeprefix("]")
        self._tentative = ""
        self._state = self._read_text
        return True
