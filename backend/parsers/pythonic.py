"""Tool calls as a Python list: `[f(a=1, b="x"), g()]`, as Llama 4 and the small models of Llama 3.2 write them.

The complete output is the list, or the list follows `<|python_start|>`. Arguments are emitted when their call is
complete, because a Python literal differs from JSON. A list in which no tool is called first is content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from backend.parsers.argument_texts import unlisted_keywords
from backend.parsers.base import (
    MAX_PARALLEL_CALLS,
    CallableTool,
    MarkerTerminal,
    OutputEvent,
    OutputParser,
    ToolCallArguments,
    ToolFormat,
    json_rule,
    quoted,
)
from backend.parsers.marker_calls import MarkerCallParser
from backend.parsers.tagged_calls import listed_arguments

START, END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(")
_MAYBE_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)?\s*")
_STRUCTURE = re.compile(r"[\"'()\[\]{}]")
MAX_NAME_CHARACTERS = 256
MAX_CUT_COMMAS = 100  # of an argument that was cut off, before which the complete arguments are searched
_JSON_WORDS = {"true": True, "false": False, "null": None}  # which models write instead of Python's words


class PythonicFormat(ToolFormat):
    """Format of a Python list of calls with keyword arguments. The grammar requires values in JSON."""

    markers = (START, END)
    begins = ""
    starts = "["

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return PythonicParser(frozenset(tool.name for tool in tools))

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        more = f" (SEPARATOR call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""
        rules = [
            'head: "["',
            f'calls: call{more} "]"',
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            'SEPARATOR: ", "',
        ]
        for i, tool in enumerate(tools):
            given = list(listed_arguments(tool))
            rules.append(f'call_{i}: {quoted(tool.name + "(")} {_argument_list(i, [g[2] for g in given])} ")"')
            for j, (key, schema, _) in enumerate(given):
                rules += [
                    f"argument_{i}_{j}: {quoted(f'{key}=')} value_{i}_{j}",
                    f"value_{i}_{j}: {json_rule(schema, strict=tool.strict)}",
                ]
        return "\n".join(rules)

    def unenforced(self, tool: CallableTool) -> list[str]:
        """See `ToolFormat.unenforced`."""
        return unlisted_keywords(tool.parameters)


def _argument_list(i: int, required: Sequence[bool]) -> str:
    """Returns an expression for arguments in their order, separated by commas. Required ones come first."""
    order = sorted(range(len(required)), key=lambda j: not required[j])
    num_required = sum(required)
    fixed = " SEPARATOR ".join(f"argument_{i}_{j}" for j in order[:num_required])
    optional = [f"argument_{i}_{j}" for j in order[num_required:]]
    if fixed:
        return " ".join([fixed, *(f"(SEPARATOR {name})?" for name in optional)])
    tails = (
        " ".join([first, *(f"(SEPARATOR {name})?" for name in optional[k + 1 :])]) for k, first in enumerate(optional)
    )
    return f"({' | '.join(tails)})?" if optional else ""


class PythonicParser(MarkerCallParser):
    """Parser of one output. `names` are the names of the tools."""

    openings = (START,)

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._state = self._at_start
        self._call = ""  # the text between the parentheses of a call, as far as it was read
        self._depth = 0
        self._quote = ""

    def finish(self) -> list[OutputEvent]:
        if self._state == self._read_call_text:
            self._events.append(ToolCallArguments(self._num_calls - 1, _begun_json(self._call)))
            self._state = self._after_call
        return super().finish()

    def _at_start(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._rest[0] != "[":
            if START.startswith(self._rest) and self._rest != START:
                return False
            return self._give_up()
        self._tentative += "["
        self._rest = self._rest[1:]
        self._state = self._read_name
        return True

    def _after_marker(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._rest[0] == "[":
            self._tentative += "["
            self._rest = self._rest[1:]
        self._state = self._read_name
        return True

    def _read_name(self) -> bool:
        name = _NAME.match(self._rest)
        if name is None:
            waits = _MAYBE_NAME.fullmatch(self._rest) is not None and len(self._rest) < MAX_NAME_CHARACTERS
            return False if waits else self._give_up()
        if name[1] not in self._names:
            return self._give_up()
        self._rest = self._rest[name.end() :]
        self._start_call(name[1])
        self._call, self._depth, self._quote = "", 1, ""
        self._state = self._read_call_text
        return True

    def _read_call_text(self) -> bool:
        """Reads up to the closing parenthesis of a call. State method."""
        at = 0
        while at < len(self._rest):
            if self._quote:
                if self._rest[at] == "\\":
                    if at + 1 == len(self._rest):
                        break  # what is escaped has not arrived
                    at += 1
                elif self._rest[at] == self._quote:
                    self._quote = ""
            elif found := _STRUCTURE.match(self._rest, at):
                if found[0] in "\"'":
                    self._quote = found[0]
                else:
                    self._depth += 1 if found[0] in "([{" else -1
                    if self._depth == 0:
                        self._emit_arguments(self._call + self._rest[:at])
                        self._rest = self._rest[at + 1 :]
                        self._state = self._after_call
                        return True
            at += 1
        self._call += self._rest[:at]
        self._rest = self._rest[at:]
        return False

    def _emit_arguments(self, text: str) -> None:
        self._events.append(ToolCallArguments(self._num_calls - 1, _as_json(text) or text or "{}"))

    def _after_call(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._rest[0] == ",":
            self._tentative += ","
            self._rest = self._rest[1:]
            self._state = self._read_name
            return True
        self._rest = self._rest.removeprefix("]")
        self._state = self._after_calls
        return True

    def _after_calls(self) -> bool:
        """Skips the closing marker. State method."""
        if not self._skip_whitespace():
            return False
        if END.startswith(self._rest) and self._rest != END:
            return False
        if self._rest.startswith(END):
            self._rest, self._tentative = self._rest.removeprefix(END), ""
        return self._give_up()

    @property
    def _is_between_calls(self) -> bool:
        return self._state in (self._after_call, self._after_calls, self._read_name, self._read_call_text)


def _as_json(text: str) -> str | None:
    """Returns the keyword arguments of a call as a JSON object, or None if they are not keywords with literals."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {str(word.arg): _literal(word.value) for word in call.keywords if word.arg is not None}
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _begun_json(text: str) -> str:
    """Returns the beginning of the arguments' JSON for a call that was cut off: its complete arguments."""
    end = len(text)
    for _ in range(MAX_CUT_COMMAS):
        if (end := text.rfind(",", 0, end)) < 0:
            break
        if (complete := _as_json(text[:end])) is not None:
            return complete.removesuffix("}")
    return "{"


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        if node.id not in _JSON_WORDS:
            raise ValueError(node.id)
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None
        }
    return ast.literal_eval(node)
