"""P1: tools and response schemas that mean the same are sent in the form in which one of them was seen first.

JSON objects have no order, but languages give them one, some a new one for every request, and `tojson` prints it into
the prompt. Sorting the keys would make up an order that nobody chose, and the order of properties can steer the order
in which a model writes arguments. So the first form of each schema is kept, and every later one that means the same
is replaced by it, for all replicas and within one cache group.

Two schemas mean the same where they are the same JSON after what the standards call unordered has been sorted: keys
of objects; the lists of `required`, `type` and `dependentRequired`. 1.0 is 1, as JSON Schema has it. The order of
every other list is kept: of `enum`, `anyOf`, `prefixItems`, and of whatever stands in `default`, `const`, `examples`.
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
MAX_TOOLS = 1024  # of one request; more would crowd out what others remember

_list = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()
_sorted = msgspec.json.Encoder(order="sorted")


class OrderMemo(ValueTransform):
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
        if unknown:  # asked for together
            raise DecisionNotLoaded(unknown)
        return None if firsts == tools else b"[" + b",".join(firsts) + b"]"

    def _first_form(self, raw: bytes, context: TransformContext) -> bytes:
        if FIELD_JSON in raw:
            return raw
        meaning = digest(raw)
        if meaning is None:
            return raw
        key = f"canonical:schema:{context.scope}:{meaning}"
        first = context.memory.find(key)
        if first is None:
            context.memory.keep(key, raw)
            return raw
        # What comes from a storage is believed only as far as it can be checked.
        return first if first == raw or digest(first) == meaning else raw


def digest(raw: bytes) -> str | None:
    """Equal for what means the same; None for what is not JSON, or too deep."""
    try:
        written = _sorted.encode(_meaning(_any.decode(raw)))
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    return hashlib.blake2b(written, digest_size=16).hexdigest()


def _meaning(schema: Any) -> Any:
    """A schema with everything sorted that has no order, but for keys of objects: the encoder does that."""
    if isinstance(schema, dict):
        return {key: _under(key, value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_meaning(item) for item in schema]
    if isinstance(schema, float) and schema.is_integer() and abs(schema) <= _EXACT_FLOAT_MAX:
        return int(schema)
    return schema


def _under(key: str, value: Any) -> Any:
    if key in _SETS and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    if key in _NAMED and isinstance(value, dict):
        return {name: _meaning(schema) for name, schema in value.items()}
    if key == "dependentRequired" and isinstance(value, dict):
        return {name: _under("required", names) for name, names in value.items()}
    return _plain(value) if key in _DATA else _meaning(value)


def _plain(value: Any) -> Any:
    """Data, in which no key has a meaning of its own."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _meaning(value)
