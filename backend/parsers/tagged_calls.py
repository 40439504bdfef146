"""Base of tool call formats that write each argument between tags, as text: Qwen3-Coder's and GLM's.

Text is not JSON: `8004` is a string if the tool's schema says so, and else a number. `ArgumentWriter` turns the text of
one argument into JSON by the types that the schema allows (`allowed_types`). Strings are emitted while they arrive.
Other values are emitted when they are complete, because `True` becomes `true`, and what is not JSON becomes a string.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from backend.parsers.argument_texts import MAX_SCHEMA_DEPTH, argument_texts, resolved, top_of, unlisted_keywords
from backend.parsers.base import (
    MAX_PARALLEL_CALLS,
    CallableTool,
    MarkerTerminal,
    ToolCallArguments,
    ToolFormat,
    json_rule,
)
from backend.parsers.json_scanner import WHITESPACE
from backend.parsers.marker_calls import MarkerCallParser, partial_marker_length

MAX_HEAD_CHARACTERS = 256  # before the first argument; longer text is content

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def allowed_types(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a schema allows, or an empty set if it does not say so. `root` resolves `$ref`."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset[str]().union(*(_JSON_TYPES.get(type(value), frozenset()) for value in values))
    found = [allowed_types(resolved(schema, root), root, depth + 1)] if "$ref" in schema else []
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        found += [allowed_types(option, root, depth + 1) for option in options] if isinstance(options, list) else []
    return frozenset[str]().union(*found)


class ArgumentWriter:
    """Turns the text of one argument into JSON. `types` are the allowed JSON types; empty means that they are unknown.

    If `trims` is true, a line break at the beginning and one at the end are not part of the text.
    """

    def __init__(self, types: frozenset[str], *, trims: bool) -> None:
        self._types = types
        self._trims = trims
        self._is_text: bool | None = types == {"string"} if types else None
        self._held = ""  # read and not emitted yet
        self._begun = False

    def push(self, text: str) -> str:
        """Reads the next piece of text, and returns the next piece of JSON."""
        self._held += text
        if self._is_text is None and (start := self._held.lstrip(WHITESPACE)):
            self._is_text = start[0] not in "{["
        if not self._is_text or not self._held:
            return ""
        opening = self._begin()
        keep = len(self._held) - self._held.endswith("\n") if self._trims else len(self._held)
        text, self._held = self._held[:keep], self._held[keep:]
        return opening + _escaped(text)

    def finish(self) -> str:
        """Returns the last piece of JSON."""
        if self._is_text:
            opening = self._begin()
            return opening + _escaped(self._trimmed_end()) + '"'
        self._held = self._held.removeprefix("\n") if self._trims else self._held
        return self._typed(self._trimmed_end())

    def _begin(self) -> str:
        if self._begun:
            return ""
        self._begun = True
        if self._trims:
            self._held = self._held.removeprefix("\n")
        return '"'

    def _trimmed_end(self) -> str:
        return self._held.removesuffix("\n") if self._trims else self._held

    def _typed(self, text: str) -> str:
        written = text.strip(WHITESPACE)
        written = _PYTHON_WORDS.get(written, written)
        try:
            found = _JSON_TYPES[type(json.loads(written, parse_constant=_reject))]
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        if found == {"string"} or (("string" in self._types or not self._types) and not self._fits(found)):
            return json.dumps(text, ensure_ascii=False)
        return written

    def _fits(self, found: frozenset[str]) -> bool:
        return bool(found & self._types) if self._types else found <= {"array", "object"}


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _reject(constant: str) -> None:
    raise ValueError(constant)


class TaggedFormat(ToolFormat):
    """Base class of formats with tagged arguments. A subclass provides the grammar's rules for its tags."""

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        more = f" (NEWLINE {terminal(self.begins)} call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""
        rules = [
            f"head: {terminal(self.begins)}",
            f"calls: call{more}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            r'NEWLINE: "\n"',
        ]
        for i, tool in enumerate(tools):
            arguments = list(listed_arguments(tool))
            names = " ".join(f"argument_{i}_{j}{'' if given[2] else '?'}" for j, given in enumerate(arguments))
            rules.append(f"call_{i}: {self.call_rule(tool.name, names, terminal)}")
            for j, (key, schema, _) in enumerate(arguments):
                rules += self.argument_rules(f"argument_{i}_{j}", key, schema, terminal, strict=tool.strict)
        return "\n".join(rules)

    def unenforced(self, tool: CallableTool) -> list[str]:
        """See `ToolFormat.unenforced`."""
        arguments = [(key, schema) for key, schema, _ in listed_arguments(tool) if not is_written_as_json(schema)]
        ignored = ((key, sorted(argument_texts(schema, schema).ignored)) for key, schema in arguments)
        return [*unlisted_keywords(tool.parameters), *(f"{key}: {', '.join(words)}" for key, words in ignored if words)]

    @abstractmethod
    def call_rule(self, name: str, arguments: str, terminal: MarkerTerminal) -> str:
        """Returns the body of the rule for what follows the marker of a call. `arguments` are the names of rules."""

    @abstractmethod
    def argument_rules(
        self, rule: str, key: str, schema: Mapping[str, Any], terminal: MarkerTerminal, *, strict: bool
    ) -> list[str]:
        """Returns the rule `rule` for one argument, and the rules that it refers to."""


def listed_arguments(tool: CallableTool) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yields name, schema and whether it is required, for each argument that a tool's schema lists."""
    root = top_of(tool.parameters)
    definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
    for key, schema in root.get("properties", {}).items():
        yield key, {**(schema if isinstance(schema, Mapping) else {}), **definitions}, key in root.get("required", ())


def is_written_as_json(schema: Mapping[str, Any]) -> bool:
    """Whether an argument of this schema is JSON. Arguments that can be strings are text."""
    types = allowed_types(schema, schema)
    return bool(types) and "string" not in types


def value_rules(
    rule: str, schema: Mapping[str, Any], closing: str, *, is_special: bool, strict: bool
) -> tuple[str, list[str]]:
    """Returns an expression for one value up to and including `closing`, and the rules that it refers to.

    `is_special`: `closing` is the terminal of a special token. Otherwise it is a quoted text.
    """
    if is_written_as_json(schema):
        return f"{rule} {closing}", [f"{rule}: {json_rule(schema, strict=strict)}"]
    pattern = argument_texts(schema, schema).pattern
    if is_special:
        return f"{rule} {closing}", [f"{rule}: /{pattern}/"]
    return rule, [f"{rule}[suffix={closing}]: /{pattern}/"]


class TaggedCallParser(MarkerCallParser):
    """Parser of one output with tagged arguments. A subclass sets the tags, and reads what surrounds the arguments.

    A key is between `key_opens` and `key_closes`, and its value between `value_opens` and `value_closes`. An empty
    `value_opens` means that nothing separates key and value. `arguments_close` follows the last value.
    """

    key_opens: ClassVar[str]
    key_closes: ClassVar[str]
    value_opens: ClassVar[str]
    value_closes: ClassVar[str]
    arguments_close: ClassVar[str]
    trims: ClassVar[bool]  # whether line breaks around a value are not part of it

    def __init__(self, tools: Sequence[CallableTool]) -> None:
        super().__init__()
        self._schemas = {tool.name: top_of(tool.parameters) for tool in tools}
        self._schema: Mapping[str, Any] = {}
        self._has_arguments = False
        self._writer = ArgumentWriter(frozenset(), trims=False)

    def _start_tagged(self, name: str) -> bool:
        self._start_call(name)
        self._schema = self._schemas.get(name, {})
        self._has_arguments = False
        self._state = self._read_key
        return True

    def _read_key(self) -> bool:
        """Reads the tag of the next key, or the end of the arguments. State method."""
        self._rest = self._rest.lstrip(WHITESPACE)
        if not self._rest:
            return False
        if self._rest.startswith(self.key_opens):
            key, found, after = self._rest.removeprefix(self.key_opens).partition(self.key_closes)
            if not found:
                return False
            return self._read_value_tag(key.strip(WHITESPACE), after)
        is_partial = any(text.startswith(self._rest) for text in (self.key_opens, self.arguments_close))
        if is_partial and self._rest != self.arguments_close:
            return False
        self._write("}" if self._has_arguments else "{}")
        self._rest = self._rest.removeprefix(self.arguments_close)
        self._state = self._after_call
        return True

    def _read_value_tag(self, key: str, after: str) -> bool:
        """Reads the tag before a value, which follows the tag of its key in `after`."""
        if self.value_opens:
            after = after.lstrip(WHITESPACE)
            if not after.startswith(self.value_opens):
                if self.value_opens.startswith(after):
                    return False  # the tag of the key is read again with the rest of this one
                after = self.value_opens + after  # the model left the tag out
        self._rest = after.removeprefix(self.value_opens)
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._writer = ArgumentWriter(allowed_types(schema, self._schema), trims=self.trims)
        self._write(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._has_arguments = True
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        """Reads a value up to its closing tag. State method."""
        text, found, after = self._rest.partition(self.value_closes)
        keep = 0 if found else partial_marker_length(text, self.value_closes)
        self._write(self._writer.push(text[: len(text) - keep]))
        self._rest = after if found else text[len(text) - keep :]
        if found:
            self._write(self._writer.finish())
            self._state = self._read_key
        return bool(found)

    def _write(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self._num_calls - 1, text))

    @property
    def _is_between_calls(self) -> bool:
        """Whether unread input is no content. Also true within a call."""
        return super()._is_between_calls or self._state in (self._read_key, self._read_value)
