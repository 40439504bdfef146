"""Validates JSON against OpenAI's published OpenAPI description, if a copy of it is present."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

SHARED = Path(os.environ.get("WARMPATH_SHARED", Path(__file__).parents[2] / "shared"))
SPEC = SHARED / "openai-spec" / "openapi.json"

Validate = Callable[[str, Any], None]


@pytest.fixture(scope="session")
def validate() -> Validate:
    """`validate("Model", value)` raises `jsonschema_rs.ValidationError` if the value does not match the model."""
    if not SPEC.exists():
        pytest.skip(f"OpenAI's description is not at {SPEC}; set WARMPATH_SHARED to its folder")
    components = _with_nulls(json.loads(SPEC.read_text())["components"])

    @functools.cache
    def validator(name: str) -> jsonschema_rs.Validator:
        return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": components})

    return lambda name, value: validator(name).validate(value)


def _with_nulls(node: Any) -> Any:
    """Replace `nullable: true` of OpenAPI 3.0. The description claims to be 3.1, whose readers ignore it."""
    if isinstance(node, list):
        return [_with_nulls(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _with_nulls(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if node.get("nullable") is True else plain


def completion_chunk(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk of /v1/completions in the form that the description allows.

    It does not allow null in `finish_reason` and `usage`, which OpenAI's own chunks contain until the last ones.
    """
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    known = {name: value for name, value in chunk.items() if name != "usage" or value is not None}
    return {**known, "choices": choices}
