"""P1 transform `order_memo` and P3 transform `property_order`: equal tools and schemas take the form seen first.

JSON objects are unordered, but some programs write their keys in another order in each request, and chat templates
print that order into the prompt. So the first form of each tool and response schema is remembered. It replaces every
later form with the same meaning, at all replicas and within one cache group.

`order_memo` treats only two things as unordered: the keys of schemas and of the objects around them (`type` before
`name`, `description` after `properties`), and the names in `required` if `properties` has all of them. No engine's
grammar depends on either. Everything else keeps its order, because the order is meaning:

* `properties`: models write the fields of an answer and the arguments of a call in this order, and engines that
  constrain output enforce it. {reasoning, answer} lets the model think first; {answer, reasoning} does not.
* `required` names that `properties` lacks: engines append these fields in the order of the names.
* `enum`, `anyOf`, `oneOf`, `allOf`, `prefixItems`, `type`: models read alternatives in order, and tool parsers convert
  an argument to the first type that fits.
* `const`, `default`, `examples` and unknown keywords: data, which engines and templates print as it is.

`property_order` also ignores the order of names in `properties`, `patternProperties`, `$defs`, `definitions` and
`dependentSchemas`. It is right only for clients that shuffle properties and engines that ignore their order, so the
policy must name it.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import msgspec

from gateway.core.cache_breakpoints import FIELD_JSON
from gateway.prompts.transforms.base import Safety, TransformContext, ValueTransform
from gateway.prompts.transforms.shared_decisions import DecisionNotLoaded

_ENVELOPES = frozenset({"function", "json_schema"})  # objects in a tool or response format that contain the schema
_ROOTS = frozenset({"parameters", "schema", "input_schema"})  # schemas in a tool or response format
_SCHEMAS = frozenset(
    {
        "items", "additionalItems", "prefixItems", "contains", "unevaluatedItems",
        "additionalProperties", "propertyNames", "unevaluatedProperties",
        "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
    }
)  # fmt: skip
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
MAX_SCHEMA_BYTES = 64 * 1024  # of one tool or response format; comparing longer ones would take too long
MAX_TOOLS = 1024  # of one request; more would evict the decisions of other tenants

_list = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder(float_hook=lambda digits: msgspec.Raw(digits.encode()))  # 1.0 and 1 differ in a `const`
_encode = msgspec.json.encode


class OrderMemo(ValueTransform):
    """Replaces tools and schemas by the first form with the same meaning."""

    name: ClassVar[str] = "order_memo"
    safety: ClassVar[Safety] = Safety.P1
    fields: ClassVar[tuple[str, ...]] = ("tools", "functions", "response_format")
    key_prefix: ClassVar[str] = "canonical:form"
    names_are_ordered: ClassVar[bool] = True

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
        """The form of this schema that was seen first. If it is seen for the first time, the given form is stored."""
        if len(raw) > MAX_SCHEMA_BYTES or FIELD_JSON in raw:
            return raw
        meaning = digest(raw, names_are_ordered=self.names_are_ordered)
        # Two forms that only parse alike must not replace each other: some parsers refuse repeated keys, or keep -0.
        if meaning is None or _encode(_any.decode(raw)) != raw:
            return raw
        key = f"{self.key_prefix}:{context.scope}:{meaning}"
        first = context.decisions.find(key)
        if first is None:
            context.decisions.decide(key, raw)
            return raw
        # The form comes from the storage, so its meaning is checked before it is used.
        same = first == raw or digest(first, names_are_ordered=self.names_are_ordered) == meaning
        return first if same else raw


class PropertyOrder(OrderMemo):
    """As `OrderMemo`, for forms that also differ in the order of their properties."""

    name: ClassVar[str] = "property_order"
    safety: ClassVar[Safety] = Safety.P3
    key_prefix: ClassVar[str] = "canonical:unordered"
    names_are_ordered: ClassVar[bool] = False


def digest(raw: bytes, *, names_are_ordered: bool = True) -> str | None:
    """A hash of the meaning of a tool or response format; None for invalid or too deep JSON.

    `names_are_ordered`: whether two forms with their properties in another order differ in meaning.
    """
    try:
        written = _encode(_envelope(_any.decode(raw), names_are_ordered))
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    return hashlib.blake2b(written, digest_size=16).hexdigest()


def _envelope(value: Any, names_are_ordered: bool) -> Any:
    """A tool or response format with its keys sorted, down to its schema."""
    if not isinstance(value, dict):
        return value
    meaning = {}
    for key in sorted(value):
        inner = value[key]
        if key in _ROOTS:
            inner = _schema(inner, names_are_ordered)
        elif key in _ENVELOPES:
            inner = _envelope(inner, names_are_ordered)
        meaning[key] = inner
    return meaning


def _schema(schema: Any, names_are_ordered: bool) -> Any:
    """A schema, or a list of schemas, with the keywords and the names in `required` sorted."""
    if isinstance(schema, list):
        return [_schema(each, names_are_ordered) for each in schema]
    if not isinstance(schema, dict):
        return schema
    meaning = {}
    for keyword in sorted(schema):
        value = schema[keyword]
        if keyword in _SCHEMAS:
            value = _schema(value, names_are_ordered)
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            names = list(value) if names_are_ordered else sorted(value)
            value = {name: _schema(value[name], names_are_ordered) for name in names}
        elif keyword == "required" and _are_properties(value, schema.get("properties")):
            value = sorted(value)
        meaning[keyword] = value
    return meaning


def _are_properties(names: Any, properties: Any) -> bool:
    return (
        isinstance(names, list)
        and isinstance(properties, dict)
        and all(isinstance(name, str) and name in properties for name in names)
    )
