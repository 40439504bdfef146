"""Regular expressions that grammars cannot enforce: those with look-around or back references.

llguidance refuses them even in a lenient schema. A schema that is not strict is compiled without them.
"""

from __future__ import annotations

import re
from typing import Any

_UNSUPPORTED = re.compile(r"\(\?<?[=!]|\(\?P=|\\[1-9]|\\k")
_SCHEMAS = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", "additionalItems"}
)
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def is_unsupported(pattern: str) -> bool:
    """Whether a grammar cannot enforce a regular expression."""
    return _UNSUPPORTED.search(pattern) is not None


def without_unsupported_patterns(schema: Any, path: str = "") -> tuple[Any, list[str]]:
    """Returns a schema without these expressions, and where they stood, as in `address.zip.pattern`."""
    if not isinstance(schema, dict):
        return schema, []
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for word, value in schema.items():
        if word == "pattern" and isinstance(value, str) and is_unsupported(value):
            dropped.append(f"{path}pattern")
            continue
        inner: list[tuple[Any, list[str]]] = []
        if word in _BY_NAME and isinstance(value, dict):
            names = [name for name in value if word != "patternProperties" or not is_unsupported(name)]
            dropped += [f"{path}patternProperties"] * (len(names) < len(value))
            inner = [without_unsupported_patterns(value[name], f"{path}{name}.") for name in names]
            value = dict(zip(names, (part for part, _ in inner), strict=True))
        elif word in _LISTS and isinstance(value, list):
            inner = [without_unsupported_patterns(each, path) for each in value]
            value = [part for part, _ in inner]
        elif word in _SCHEMAS:
            inner = [without_unsupported_patterns(value, path)]
            value = inner[0][0]
        kept[word] = value
        dropped += [where for _, found in inner for where in found]
    return kept, dropped
