"""Tool calls of Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>` anywhere in the text."""

from __future__ import annotations

from collections.abc import Sequence

from backend.parsers.base import (
    MAX_PARALLEL_CALLS,
    CallableTool,
    MarkerTerminal,
    OutputParser,
    ToolFormat,
    named_call_rules,
)
from backend.parsers.marker_calls import MarkerCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """Format of JSON calls between `<tool_call>` and `</tool_call>`."""

    markers = (OPEN, CLOSE)
    begins = OPEN

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return HermesParser()

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        rules = [
            f"head: {terminal(OPEN)}",
            f"calls: call{f' (NEWLINE {terminal(OPEN)} call){{0,{MAX_PARALLEL_CALLS - 1}}}' if parallel else ''}",
            f'call: "\\n" ({" | ".join(f"call_{i}" for i in range(len(tools)))}) "\\n" {terminal(CLOSE)}',
            r'NEWLINE: "\n"',
        ]
        return "\n".join([*rules, *named_call_rules(tools, "arguments")])


class HermesParser(MarkerCallParser):
    """Parser of one output with calls between `<tool_call>` and `</tool_call>`."""

    openings = (OPEN,)

    def _after_marker(self) -> bool:
        return self._begin_call()

    def _after_call(self) -> bool:
        if not self._skip_whitespace():
            return False
        if CLOSE.startswith(self._rest) and self._rest != CLOSE:
            return False
        self._rest = self._rest.removeprefix(CLOSE)
        self._tentative = ""
        self._state = self._read_text
        return True
