"""Tool calls of Granite 3 and Phi-4: a JSON list after a marker, `[{"name": "f", "arguments": {...}}, ...]`."""

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


class JsonListFormat(ToolFormat):
    """Format of a JSON list of calls after one of `openings`, and before `closing` unless that is empty.

    The grammar requires the first opening.
    """

    def __init__(self, *openings: str, closing: str = "") -> None:
        self.begins = openings[0]
        self.markers = (*openings, closing) if closing else openings
        self._openings = openings
        self._closing = closing

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return JsonListParser(self._openings, self._closing)

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        more = f" (SEPARATOR call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""
        rules = [
            f"head: {terminal(self.begins)}",
            f'calls: "[" call{more} "]"{f" {terminal(self._closing)}" if self._closing else ""}',
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            'SEPARATOR: ", "',
        ]
        return "\n".join([*rules, *named_call_rules(tools, "arguments")])


class JsonListParser(MarkerCallParser):
    """Parser of one output with a list of calls, or a single call, after one of `openings`."""

    def __init__(self, openings: tuple[str, ...], closing: str = "") -> None:
        super().__init__()
        self.openings = openings
        self._closing = closing
        self._in_list = False

    def _after_marker(self) -> bool:
        if not self._skip_whitespace():
            return False
        self._in_list = self._rest[0] == "["
        if self._in_list:
            self._tentative += "["
            self._rest = self._rest[1:]
        return self._begin_call() if self._in_list or self._rest.startswith("{") else self._read_unlisted()

    def _read_unlisted(self) -> bool:
        """Starts to read what follows a marker if it is neither a list nor an object."""
        return self._give_up()

    def _after_call(self) -> bool:
        if not self._in_list:
            self._state = self._after_calls
            return True
        if not self._skip_whitespace():
            return False
        if self._rest[0] == ",":
            self._tentative += ","
            self._rest = self._rest[1:]
            return self._begin_call()
        self._rest = self._rest.removeprefix("]")
        self._in_list = False
        self._state = self._after_calls
        return True

    def _after_calls(self) -> bool:
        """Skips the closing marker. State method."""
        if self._closing and not self._skip_whitespace():
            return False
        if self._closing.startswith(self._rest) and self._rest != self._closing:
            return False
        self._rest = self._rest.removeprefix(self._closing)
        self._tentative = ""
        self._state = self._read_text
        return True

    @property
    def _is_between_calls(self) -> bool:
        return super()._is_between_calls or self._state == self._after_calls
