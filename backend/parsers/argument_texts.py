"""Which texts a schema allows for an argument that a format writes as text, as a regular expression.

Such a text is not JSON, so llguidance's JSON schemas do not apply to it. A regular expression expresses only some
keywords of schemas. `ArgumentTexts.ignored` names the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backend.parsers.unsupported_patterns import is_unsupported

MAX_SCHEMA_DEPTH = 8  # of nested `anyOf` and `$ref`
ANY_TEXT = "(?s:.*)"

_ANNOTATIONS = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
     "$schema", "$id", "$defs", "definitions"}
)  # fmt: skip
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_ATOM = "[A-Za-z0-9_+-]+"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([1-9][0-9]{0,8}W|[1-9][0-9]{0,8}D(T[1-9][0-9]{0,8}[HMS])?|T[1-9][0-9]{0,8}[HMS])",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"(({_GROUP}:){{7}}{_GROUP}|({_GROUP}(:{_GROUP}){{0,3}})?::({_GROUP}(:{_GROUP}){{0,2}})?)",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_OTHER_TYPES = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": "-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
}


_WORDS_OF_TYPES = {  # keywords that have no meaning for other types
    ("string",): frozenset({"pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType"}),
    ("integer", "number"): frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    ("array",): frozenset(
        {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"}
    ),
    ("object",): frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
         "maxProperties", "dependentRequired", "dependentSchemas"}
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArgumentTexts:
    """The texts that a schema allows. `ignored`: its keywords that `pattern` does not enforce."""

    pattern: str = ANY_TEXT
    ignored: frozenset[str] = frozenset()


def argument_texts(schema: object, root: Mapping[str, Any], depth: int = 0) -> ArgumentTexts:
    """Returns the texts that a schema allows. `root` resolves `$ref`."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return ArgumentTexts()
    words = frozenset(schema) - _ANNOTATIONS
    if "$ref" in schema:
        target = resolved(schema, root)
        rest = {word: value for word, value in schema.items() if word != "$ref"}
        return argument_texts({**(target if isinstance(target, Mapping) else {}), **rest}, root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        if words == {word} and isinstance(options, list) and options and (word != "allOf" or len(options) == 1):
            return _one_of(argument_texts(option, root, depth + 1) for option in options)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return ArgumentTexts(_choice(map(_value, values)), words - {"enum", "const"})
    named = schema.get("type", "string")
    types = [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]
    return _one_of(_texts_of_type(name, schema, words) for name in types)


def _texts_of_type(name: str, schema: Mapping[str, Any], words: frozenset[str]) -> ArgumentTexts:
    others = frozenset[str]().union(*(only for kind, only in _WORDS_OF_TYPES.items() if name not in kind))
    if name == "string":
        return _string(schema, words - others)
    if name in _OTHER_TYPES:
        return ArgumentTexts(_OTHER_TYPES[name], words - others)
    return ArgumentTexts(ignored=frozenset({"type"}) | words - others)


def _one_of(options: Iterable[ArgumentTexts]) -> ArgumentTexts:
    listed = list(dict.fromkeys(options))
    if ArgumentTexts() in listed:
        return ArgumentTexts()  # a string may be any text
    return ArgumentTexts(
        _choice(each.pattern for each in listed), frozenset().union(*(each.ignored for each in listed))
    )


def _string(schema: Mapping[str, Any], words: frozenset[str]) -> ArgumentTexts:
    pattern, format = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and not is_unsupported(pattern):
        begin = "" if pattern.startswith("^") else ANY_TEXT
        end = "" if pattern.endswith("$") else ANY_TEXT
        inner = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
        return ArgumentTexts(f"{begin}({inner}){end}", words - {"pattern"})
    if isinstance(format, str) and format in _FORMATS:
        return ArgumentTexts(_FORMATS[format], words - {"format"})
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    bounded = f"(?s:.{{{shortest},{longest}}})" if shortest or longest != "" else ANY_TEXT
    return ArgumentTexts(bounded, words - {"minLength", "maxLength"})


def _choice(patterns: Iterable[str]) -> str:
    listed = list(dict.fromkeys(patterns))
    return listed[0] if len(listed) == 1 else f"({'|'.join(listed)})"


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text).replace("\n", r"\n").replace("\r", r"\r")


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> object:
    """Returns what a `$ref` within the same document refers to, or None."""
    found: object = root
    for part in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def top_of(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns a tool's schema. A `$ref` at its top is replaced by what it refers to."""
    top = parameters or {}
    for _ in range(MAX_SCHEMA_DEPTH):
        if "$ref" not in top:
            break
        target = resolved(top, top)
        rest = {word: value for word, value in top.items() if word != "$ref"}
        top = {**(target if isinstance(target, Mapping) else {}), **rest}
    return top


def unlisted_keywords(parameters: Mapping[str, Any] | None) -> list[str]:
    """Returns the keywords at the top of a tool's schema that say more than which arguments it has."""
    enforced = _ANNOTATIONS | {"properties", "required", "additionalProperties", "patternProperties", "maxProperties"}
    return sorted(top_of(parameters).keys() - enforced)
