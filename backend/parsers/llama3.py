"""Tool calls of Llama 3: the complete output is `{"name": "f", "parameters": {...}}`, or several of these after `;`.

Content in JSON can look the same, so an output counts as a call only if its name is the name of a tool. The larger
models write `<|python_tag|>` before calls. After this marker, calls can also follow text.
"""

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

TAG = "<|python_tag|>"


class Llama3Format(ToolFormat):
    """Format of JSON calls without a marker or after `<|python_tag|>`."""

    markers = (TAG,)
    begins = ""

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return Llama3Parser(frozenset(tool.name for tool in tools))

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        rules = [
            'head: ""',
            f"calls: call{f' (SEPARATOR call){{0,{MAX_PARALLEL_CALLS - 1}}}' if parallel else ''}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            'SEPARATOR: "; "',
        ]
        return "\n".join([*rules, *named_call_rules(tools, "parameters")])


class Llama3Parser(MarkerCallParser):
    """Parser of one output. `names` are the names of the tools. JSON with another name is not a call."""

    openings = (TAG,)

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._state = self._at_start

    def _at_start(self) -> bool:
        if not self._skip_whitespace():
            return False
        return self._begin_call(self._names) if self._rest.startswith("{") else self._give_up()

    def _after_marker(self) -> bool:
        return self._begin_call(self._names)

    def _after_call(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._rest[0] in ";,":
            self._tentative += self._rest[0]
            self._rest = self._rest[1:]
            return True
        return self._begin_call(self._names) if self._rest[0] == "{" else self._give_up()
