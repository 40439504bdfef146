"""Structured output and forced tool calls of a random model, through OpenAI's client."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx2
import jsonschema_rs
import pydantic
import pytest

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer

pytestmark = pytest.mark.e2e

MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ZIP = {
    "type": "object",
    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{4}$"}},
    "required": ["zip"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Rain?", "parameters": ZIP}},
    {"type": "function", "function": {"name": "now"}},
]
HOT: Any = {"temperature": 1.5, "max_tokens": 400}


def create(server: RunningServer, **options: Any) -> Any:
    return server.client().chat.completions.create(model=server.model, messages=MESSAGES, **HOT, **options)


class Person(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)


def test_whole_and_streamed_output_follows_the_schema(server: RunningServer) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for seed in range(5):
        whole = create(server, response_format=format, seed=seed).choices[0]
        assert whole.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(whole.message.content))
        chunks = create(server, response_format=format, seed=seed, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content


def test_the_clients_own_parsing_helpers(server: RunningServer) -> None:
    client = server.client(strict=False)
    parsed = client.chat.completions.parse(model=server.model, messages=MESSAGES, response_format=Person, **HOT)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with client.chat.completions.stream(model=server.model, messages=MESSAGES, response_format=Person, **HOT) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


def test_a_json_object(server: RunningServer) -> None:
    for choice in create(server, response_format={"type": "json_object"}, n=3, seed=2).choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.startswith("{")


@pytest.mark.parametrize("prefix", ["structured_outputs", "guided"])
@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[A-F]{3}-[0-9]{2}", r"[A-F]{3}-[0-9]{2}"),
        ("choice", ["yes", "no", 'may"be'], r'yes|no|may"be'),
        ("grammar", 'start: ("ab" | "cd"){2}', r"(ab|cd){2}"),
        ("grammar", 'root ::= "ab" [0-9] ("," [0-9])?', r"ab[0-9](,[0-9])?"),
        ("json", {"enum": ["x", 7]}, r'"x"|7'),
        ("json", '{"type": "boolean"}', "true|false"),
    ],
)
def test_vllms_fields_in_chat_and_completions(
    server: RunningServer, prefix: str, kind: str, value: Any, pattern: str
) -> None:
    extra: Any = {f"guided_{kind}": value} if prefix == "guided" else {"structured_outputs": {kind: value}}
    choice = create(server, extra_body=extra, seed=1).choices[0]
    assert (re.fullmatch(pattern, choice.message.content) is not None, choice.finish_reason) == (True, "stop")
    reply = server.client().completions.create(model=server.model, prompt=["Hi", "You"], extra_body=extra, **HOT)
    assert all(re.fullmatch(pattern, choice.text) for choice in reply.choices)


@pytest.mark.parametrize("parallel", [None, False])
def test_whole_and_streamed_required_calls_are_equal(server: RunningServer, parallel: bool | None) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": "required", **HOT}
    if parallel is not None:
        options["parallel_tool_calls"] = parallel
    numbers = set()
    for seed in range(4):
        options |= {"seed": seed, "max_tokens": 120}
        whole = server.client().chat.completions.create(model=server.model, messages=MESSAGES, **options).choices[0]
        message = whole.message
        assert message.content is None
        assert message.tool_calls
        numbers.add(len(message.tool_calls))
        complete = message.tool_calls if whole.finish_reason == "tool_calls" else message.tool_calls[:-1]
        for call in complete:
            assert call.function.name in ("weather", "now")
            arguments = json.loads(call.function.arguments)
            jsonschema_rs.validate(ZIP if call.function.name == "weather" else {"type": "object"}, arguments)
        # The stream through the client's accumulator.
        with server.client(strict=False).chat.completions.stream(
            model=server.model, messages=MESSAGES, **options
        ) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == whole.finish_reason
        assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls or ()] == [
            (c.function.name, c.function.arguments) for c in message.tool_calls
        ]
        assert len({c.id for c in final.message.tool_calls or ()}) == len(message.tool_calls)
        assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
    assert (numbers == {1}) is (parallel is False)


def test_a_named_call(server: RunningServer) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    choice = create(server, tools=TOOLS, tool_choice=named, parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    jsonschema_rs.validate(ZIP, json.loads(call.function.arguments))
    assert choice.finish_reason == "stop"  # as OpenAI's API if the request forces the call


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": '{"grammars": []}'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "root ::= a"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": f"root ::= {'(' * 5000}"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "false"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "true"}}, None),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]}, None),
        (
            {
                "tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
    ],
)
def test_constraints_that_cannot_be_compiled_are_rejected_by_name(
    server: RunningServer, fields: dict[str, Any], param: str | None
) -> None:
    reply = httpx2.post(
        f"{server.base_url}/chat/completions",
        json={"model": server.model, "messages": MESSAGES, "max_tokens": 2, **fields},
    )
    if param is None:  # any JSON is accepted, or no constraint applies and nothing is compiled
        assert reply.status_code == 200
        return
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert f"`{param}`" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs.grammar", "no text satisfies it"),
        ({"guided_regex": "a" * 600_000}, "guided_regex", "600002 bytes"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True,
                                                                      "schema": {"not": {}}}}},
         "response_format.json_schema.schema", 'Unimplemented keys: ["not"]'),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
         "tools[0].function.parameters", 'Unimplemented keys: ["not"]'),
    ],
)  # fmt: skip
def test_a_grammar_that_is_refused_names_field_and_cause(
    server: RunningServer, fields: dict[str, Any], param: str, problem: str
) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 4, **fields}
    reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert problem in reply.json()["error"]["message"]


def test_a_schema_nested_too_deeply_is_a_400(server: RunningServer) -> None:
    schema: Any = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    body = {"model": server.model, "messages": MESSAGES, "guided_json": schema}
    reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guided_json")


def test_a_schema_that_is_not_strict_is_relaxed_and_says_so(server: RunningServer) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "maxItems": 2}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": server.model, "messages": MESSAGES, "response_format": format, "max_tokens": 40}
    for stream in (False, True):
        reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body | {"stream": stream}, timeout=60)
        assert reply.status_code == 200
        assert (
            reply.headers["x-schema-relaxed"] == 'response_format.json_schema.schema: Unimplemented keys: ["contains"]'
        )
