"""Generated JSON schemas, and what the documentation lets `order_memo` change in them, written a second time."""

from __future__ import annotations

from random import Random
from typing import Any

Json = Any
MAPS = ("properties", "$defs")
LISTS = ("anyOf", "allOf")


def object_schema(random: Random, depth: int = 2) -> dict[str, Json]:
    """A schema of an object with one to four properties, whose names and values are unlike all others."""
    names = [f"p{random.randrange(10**6)}" for _ in range(random.randrange(1, 5))]
    schema: dict[str, Json] = {
        "type": "object",
        "properties": {name: field_schema(random, depth) for name in names},
        "additionalProperties": False,
    }
    if random.random() < 0.7:
        schema["required"] = random.sample(names, random.randrange(1, len(names) + 1))
    if random.random() < 0.5:
        schema["description"] = f"words {random.randrange(10**6)}"
    return schema


def field_schema(random: Random, depth: int) -> dict[str, Json]:
    """A schema of one property: a scalar, a list, alternatives, data, or an object."""
    number = random.randrange(10**6)
    kinds: list[dict[str, Json]] = [
        {"type": "string", "description": f"words {number}", "maxLength": 3},
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"type": "boolean", "default": True},
        {"type": random.sample(["string", "null"], 2), "maxLength": 2},
        {"enum": [f"v{number}", f"w{number}"], "description": "one of them"},
        {"const": {f"z{number}": 1, f"a{number}": 1.0}},
    ]
    if depth:
        kinds += [
            object_schema(random, depth - 1),
            {"type": "array", "items": object_schema(random, depth - 1), "maxItems": 2},
            {"anyOf": [object_schema(random, depth - 1), {"type": "null"}], "description": f"words {number}"},
        ]
    return random.choice(kinds)


def tool_of(schema: Json, random: Random, **more: Json) -> dict[str, Json]:
    """A tool with these parameters."""
    function = {"name": f"f{random.randrange(10**6)}", "description": "Does it.", "parameters": schema, **more}
    return {"type": "function", "function": function}


def reordered(value: Json, random: Random) -> Json:
    """A tool or response format with the keys of schemas, and of the objects around them, in another order."""
    items = list(value.items())
    random.shuffle(items)
    return {key: _reordered_under(key, inner, random) for key, inner in items}


def _reordered_under(key: str, inner: Json, random: Random) -> Json:
    if key in ("function", "json_schema", "parameters", "schema", "items"):
        return reordered(inner, random)
    if key in MAPS:
        return {name: reordered(schema, random) for name, schema in inner.items()}
    if key in LISTS:
        return [reordered(schema, random) for schema in inner]
    return random.sample(inner, len(inner)) if key == "required" else inner


def meaning(value: Json, key: str = "") -> Json:
    """A tool or response format as a value that is equal for two forms if one may replace the other."""
    if key in MAPS:
        return [(name, meaning(schema)) for name, schema in value.items()]
    if key in LISTS:
        return [meaning(schema) for schema in value]
    if key == "required":
        return sorted(value)
    if isinstance(value, dict) and key in ("", "function", "json_schema", "parameters", "schema", "items"):
        return {name: meaning(inner, name or "-") for name, inner in value.items()}
    return repr(value)


def without_order(value: Json, random: Random) -> Json:
    """The same schema with the properties of every object in another order."""
    if isinstance(value, list):
        return [without_order(item, random) for item in value]
    if not isinstance(value, dict):
        return value
    items = [(key, without_order(inner, random) if key != "const" else inner) for key, inner in value.items()]
    return {
        key: dict(random.sample(list(inner.items()), len(inner))) if key == "properties" else inner
        for key, inner in items
    }
