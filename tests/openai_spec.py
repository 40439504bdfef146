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
OK = "200"


class Description:
    """OpenAI's description: which operations there are, and what their answers look like."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = _with_nulls(document["components"])
        self._answers: dict[tuple[str, str, str], Any] = {
            (method.upper(), path, kind): _with_nulls(content.get("schema", {}))
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
            for kind, content in operation["responses"].get(OK, {}).get("content", {}).items()
        }
        self.operations = [
            (method.upper(), path) for path, operations in document["paths"].items() for method in operations
        ]
        self.streaming = [(method, path) for method, path, kind in self._answers if kind == "text/event-stream"]

    @functools.cache  # noqa: B019 - one object in a session
    def _validator(self, schema: str) -> jsonschema_rs.Validator:
        return jsonschema_rs.validator_for({**json.loads(schema), "components": self._components})

    def validate(self, name: str, value: Any) -> None:
        """Raise `jsonschema_rs.ValidationError` if the value does not match the model of this name."""
        self._validator(json.dumps({"$ref": f"#/components/schemas/{name}"})).validate(value)

    def validate_answer(self, method: str, path: str, media_type: str, value: Any) -> None:
        """Raise `jsonschema_rs.ValidationError` if the value is no answer of an operation.

        Answers without a description have any form.
        """
        schema = self._answers.get((method, path, media_type))
        if schema is not None:
            self._validator(json.dumps(schema)).validate(value)


@pytest.fixture(scope="session")
def description() -> Description:
    """OpenAI's description."""
    if not SPEC.exists():
        pytest.skip(f"OpenAI's description is not at {SPEC}; set WARMPATH_SHARED to its folder")
    return Description(json.loads(SPEC.read_text()))


@pytest.fixture(scope="session")
def validate(description: Description) -> Validate:
    """`validate("Model", value)` raises `jsonschema_rs.ValidationError` if the value does not match the model."""
    return description.validate


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
