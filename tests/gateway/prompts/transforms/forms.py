"""Canonical forms of small requests, for the tests of transforms."""

from __future__ import annotations

import json
from typing import Any

from gateway.prompts.transforms import VERSION, TransformPipeline, TransformPlan
from tests.gateway.prompts.transforms.test_promises import canonical


def canonical_form(body: dict[str, Any], *opt_in: str, pipeline: TransformPipeline | None = None, **plan: Any) -> Any:
    wanted = TransformPlan(VERSION, "full" if opt_in else "safe", opt_in, **plan)
    return json.loads(canonical(json.dumps({"model": "m", **body}).encode(), wanted, pipeline))


def system(content: Any, *opt_in: str, **more: Any) -> Any:
    body = {"messages": [{"role": "system", "content": content, **more}, {"role": "user", "content": "go"}]}
    return canonical_form(body, *opt_in)["messages"][0]["content"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}
