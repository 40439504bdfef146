"""Schemas whose keys or properties are in another order: `order_memo` and `property_order`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.endpoints import ENDPOINTS
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.transforms import VERSION, SharedDecisions, TransformPipeline, TransformPlan
from gateway.types import Principal
from tests.gateway.calls import UNTRACED, a_policy
from tests.gateway.prompts.transforms.forms import canonical_form, tool
from tests.gateway.prompts.transforms.test_promises import canonical

HELLO = [{"role": "user", "content": "hi"}]
FIRST: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"b": {"type": "number", "minimum": 1}, "a": {"enum": ["y", "x"]}},
    "required": ["b", "a"]}}}  # fmt: skip
LATER: dict[str, Any] = {"function": {"parameters": {
    "required": ["a", "b"], "properties": {"b": {"minimum": 1, "type": "number"}, "a": {"enum": ["y", "x"]}},
    "type": "object"}, "name": "f"}, "type": "function"}  # fmt: skip
SHUFFLED: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"enum": ["y", "x"]}, "b": {"type": "number", "minimum": 1}},
    "required": ["b", "a"]}}}  # fmt: skip


def tools_sent(*tools: Any, opt_in: tuple[str, ...] = ()) -> list[str]:
    """The tools of consecutive requests, as JSON with the order of keys."""
    pipeline = TransformPipeline(SharedDecisions())
    forms = [canonical_form({"messages": HELLO, "tools": [t]}, *opt_in, pipeline=pipeline)["tools"] for t in tools]
    return [json.dumps(form[0]) for form in forms]


def formats_sent(*schemas: Any, opt_in: tuple[str, ...] = ()) -> list[str]:
    """The response schemas of consecutive requests, as JSON with the order of keys."""
    pipeline = TransformPipeline(SharedDecisions())
    formats = [{"type": "json_schema", "json_schema": {"name": "n", "schema": schema}} for schema in schemas]
    forms = [
        canonical_form({"messages": HELLO, "response_format": f}, *opt_in, pipeline=pipeline)["response_format"]
        for f in formats
    ]
    return [json.dumps(form["json_schema"]["schema"]) for form in forms]


def test_schemas_with_one_meaning_take_the_first_form() -> None:
    assert tools_sent(FIRST, LATER) == [json.dumps(FIRST)] * 2
    assert formats_sent(FIRST["function"]["parameters"], LATER["function"]["parameters"]) == (
        [json.dumps(FIRST["function"]["parameters"])] * 2
    )


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": True}])
def test_the_order_of_properties_is_meaning(strict: Any) -> None:
    """A model that may think before it answers gives another answer than one that must answer first."""
    one, other = (
        {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": sorted(names)}
        for names in (["reasoning", "answer"], ["answer", "reasoning"])
    )
    for nest in (
        lambda schema: schema,
        lambda schema: {"type": "object", "properties": {"steps": {"type": "array", "items": schema}}},
        lambda schema: {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": schema}},
    ):
        schemas = [nest(one), nest(other)]
        assert formats_sent(*schemas) == [json.dumps(schema) for schema in schemas]
        tools = [{"type": "function", "function": {"name": "f", "parameters": s, **strict}} for s in schemas]
        assert tools_sent(*tools) == [json.dumps(tool) for tool in tools]


def test_the_policy_may_ignore_the_order_of_properties() -> None:
    assert tools_sent(FIRST, SHUFFLED, opt_in=("property_order",)) == [json.dumps(FIRST)] * 2
    schemas = [tool["function"]["parameters"] for tool in (FIRST, SHUFFLED, LATER)]
    assert formats_sent(*schemas, opt_in=("property_order",)) == [json.dumps(schemas[0])] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"enum": ["a", "b"]}, {"enum": ["b", "a"]}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "null"}, {"type": "string"}]}),
        ({"type": ["string", "integer"]}, {"type": ["integer", "string"]}),
        ({"required": ["a", "b"]}, {"required": ["b", "a"]}),
        ({"default": {"required": ["a", "b"]}}, {"default": {"required": ["b", "a"]}}),
        ({"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}),
        ({"examples": [{"a": 1, "b": 2}]}, {"examples": [{"b": 2, "a": 1}]}),
        ({"x-unknown": {"a": 1, "b": 2}}, {"x-unknown": {"b": 2, "a": 1}}),
        ({"const": 1}, {"const": True}),
        ({"const": 1}, {"const": "1"}),
        ({"const": 1}, {"const": 1.0}),
        ({"maximum": 2**53 + 1}, {"maximum": float(2**53)}),
    ],
)
@pytest.mark.parametrize("opt_in", [(), ("property_order",)])
def test_schemas_with_different_meanings_stay_different(one: Any, other: Any, opt_in: tuple[str, ...]) -> None:
    assert formats_sent(one, other, opt_in=opt_in) == [json.dumps(one), json.dumps(other)]
    tools = [tool("f", a=schema) for schema in (one, other)]
    assert tools_sent(*tools, opt_in=opt_in) == [json.dumps(tool) for tool in tools]


@pytest.mark.parametrize("bad", [b'"type":"object","type":"object"', b'"type":"object","minLength":-0'])
def test_a_form_that_some_parsers_refuse_replaces_no_other(bad: bytes) -> None:
    pipeline = TransformPipeline(SharedDecisions())
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","parameters":{%b}}]}'
    good = b'"type":"object"' + (b',"minLength":0' if b"-0" in bad else b"")
    for schema in (bad, good, bad):
        assert canonical(body % schema, TransformPlan(VERSION, "safe"), pipeline) == body % schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    pipeline = TransformPipeline(SharedDecisions())
    hello = [{"role": "user", "content": "hi"}]
    both: dict[str, Any] = {"a": {}, "b": {}}
    one, other = (
        tool("f", default={"type": "object", "properties": both, "required": order})
        for order in (["a", "b"], ["b", "a"])
    )
    for tools in ([one], [other]):
        assert canonical_form({"messages": hello, "tools": tools}, pipeline=pipeline)["tools"] == [one]


@pytest.mark.parametrize(("group", "shared"), [(None, False), ("public", True)])
def test_first_forms_are_shared_within_a_cache_group_only(group: str | None, shared: bool) -> None:
    """Otherwise the token count of one tenant's schema would reveal what another tenant has sent."""
    policy = a_policy(tenants=[{"name": name, "cache_group": group} for name in "tu"])
    canonicaliser = Canonicaliser(b"secret")
    hello = [{"role": "user", "content": "hi"}]
    first = tool("f", b={"type": "string"})
    second = dict(reversed(first.items()))
    calls = [
        canonicaliser.canonicalise(
            ENDPOINTS[0], json.dumps({"model": "m", "messages": hello, "tools": [t]}).encode(), {}, call_id="c",
            principal=Principal(policy.tenants_by_name[name], "k"), policy=policy, now=0.0, trace=UNTRACED,
        )
        for name, t in (("t", first), ("u", second))
    ]  # fmt: skip
    assert (bytes(calls[0].fields["tools"]) == bytes(calls[1].fields["tools"])) is shared
    assert ("order_memo" in calls[1].canonical_steps) is shared
