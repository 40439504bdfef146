"""P1 transform `order_memo`: tools and response schemas with one meaning are sent in the form that was seen first.

JSON objects are unordered, but programming languages order them, some differently for each request, and `tojson` prints
that order into the prompt. Sorting the keys would impose an order that no client chose, and the order of properties
can influence the order in which a model writes arguments. So the first form of each schema is remembered and replaces
every later form with the same meaning, at all replicas and within one cache group.

Two schemas have the same meaning if they are the same JSON after sorting what the standards call unordered: the keys of
objects, and the lists of `required`, `type` and `dependentRequired`. 1.0 equals 1, as in JSON Schema. All other lists
keep their order: `enum`, `anyOf`, `prefixItems`, and everything in `default`, `const` and `examples`.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import msgspec

from gateway.core.cache_breakpoints import FIELD_JSON
from gateway.prompts.transforms.base import Safety, TransformContext, ValueTransform
from gateway.prompts.transforms.shared_decisions import DecisionNotLoaded

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
_SETS = frozenset({"required", "type"})
_EXACT_FLOAT_MAX = 2**53
MAX_TOOLS = 1024  # of one request; more would evict the decisions of other tenants

_list = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()
_sorted = msgspec.json.Encoder(order="sorted")


class OrderMemo(ValueTransform):
    """Replaces tools and schemas by the first form with the same meaning."""

    name: ClassVar[str] = "order_memo"
    safety: ClassVar[Safety] = Safety.P1
    fields: ClassVar[tuple[str, ...]] = ("tools", "functions", "response_format")

    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        if not raw.startswith(b"["):  # a response_format
            first = self._first_form(raw, context) if b'"json_schema"' in raw else raw
            return None if first == raw else first
        tools = [bytes(tool) for tool in _list.decode(raw)]
        if len(tools) > MAX_TOOLS:
            return None
        firsts: list[bytes] = []
        unknown: list[str] = []
        for tool in tools:
            try:
                firsts.append(self._first_form(tool, context))
            except DecisionNotLoaded as missing:
                unknown += missing.keys
        if unknown:  # loaded together
            raise DecisionNotLoaded(unknown)
        return None if firsts == tools else b"[" + b",".join(firsts) + b"]"

    def _first_form(self, raw: bytes, context: TransformContext) -> bytes:
        """The form of this schema that was seen first. Decides for the given form if none was."""
        if FIELD_JSON in raw:
            return raw
        meaning = digest(raw)
        if meaning is None:
            return raw
        key = f"canonical:schema:{context.scope}:{meaning}"
        first = context.decisions.find(key)
        if first is None:
            context.decisions.decide(key, raw)
            return raw
        # The form comes from the storage, so its meaning is checked before it is used.
        return first if first == raw or digest(first) == meaning else raw


def digest(raw: bytes) -> str | None:
    """A hash of the schema's meaning; None for invalid or too deep JSON."""
    try:
        written = _sorted.encode(_meaning(_any.decode(raw)))
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    return hashlib.blake2b(written, digest_size=16).hexdigest()


def _meaning(schema: Any) -> Any:
    """The schema with all unordered lists sorted. The encoder sorts the keys of objects."""
    if isinstance(schema, dict):
        return {key: _under(key, value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_meaning(item) for item in schema]
    if isinstance(schema, float) and schema.is_integer() and abs(schema) <= _EXACT_FLOAT_MAX:
        return int(schema)
    return schema


def _under(key: str, value: Any) -> Any:
    """The meaning of a value under a schema's key."""
    if key in _SETS and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    if key in _NAMED and isinstance(value, dict):
        return {name: _meaning(schema) for name, schema in value.items()}
    if key == "dependentRequired" and isinstance(value, dict):
        return {name: _under("required", names) for name, names in value.items()}
    return _plain(value) if key in _DATA else _meaning(value)


def _plain(value: Any) -> Any:
    """The meaning of plain data, in which no key has a special meaning."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _meaning(value)
