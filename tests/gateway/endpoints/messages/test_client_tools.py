"""Anthropic's tools that the client runs, as functions, against the types of Anthropic's SDK."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from anthropic.types import beta
from anthropic.types.beta import beta_memory_tool_20250818_command as memory_commands

from gateway.core.errors import BadRequest
from gateway.endpoints.messages import MessagesEndpoint
from gateway.endpoints.messages.client_tools import CLIENT_TOOLS
from gateway.prompts.reader import ParsedBody, read_fields

SDK_TYPES: dict[str, Any] = {
    "bash_20241022": beta.BetaToolBash20241022Param,
    "bash_20250124": beta.BetaToolBash20250124Param,
    "text_editor_20241022": beta.BetaToolTextEditor20241022Param,
    "text_editor_20250124": beta.BetaToolTextEditor20250124Param,
    "text_editor_20250429": beta.BetaToolTextEditor20250429Param,
    "text_editor_20250728": beta.BetaToolTextEditor20250728Param,
    "memory_20250818": beta.BetaMemoryTool20250818Param,
}


def read(*tools: dict[str, Any]) -> ParsedBody:
    messages = [{"role": "user", "content": "hi"}]
    body = msgspec.json.encode({"model": "m", "max_tokens": 9, "messages": messages, "tools": tools})
    return MessagesEndpoint().read(read_fields(body), body)


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_each_tool_becomes_a_function_of_the_sdks_name(kind: str) -> None:
    hints = typing.get_type_hints(SDK_TYPES[kind])
    (name,) = typing.get_args(hints["name"])
    (sdk_kind,) = typing.get_args(hints["type"])
    more = {"max_characters": 9_000} if "max_characters" in hints else {}
    parsed = read({"type": sdk_kind, "name": name, "cache_control": {"type": "ephemeral"}, **more})
    (tool,) = msgspec.json.decode(parsed.fields["tools"])
    function = tool["function"]
    assert (tool["type"], function["name"]) == ("function", name) and "cache_control" not in tool
    schema = function["parameters"]
    assert function["description"] and set(schema["required"]) <= schema["properties"].keys()


def test_the_memory_tool_has_the_parameters_of_all_commands() -> None:
    schema = CLIENT_TOOLS["memory_20250818"].schema
    commands = {}
    for model in typing.get_args(typing.get_args(memory_commands.BetaMemoryTool20250818Command)[0]):
        (command,) = typing.get_args(model.model_fields["command"].annotation)
        commands[command] = model.model_fields.keys()
    assert set(schema["properties"]["command"]["enum"]) == commands.keys()
    assert set().union(*commands.values()) == schema["properties"].keys()


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "bash_20250124", "name": "shell"}, "tools[0].name"),
        ({"type": "bash_20250124", "name": "bash", "input_schema": {}}, "tools[0]"),
        ({"type": "bash_20990101", "name": "bash"}, "tools[0].type"),
        ({"type": "computer_20250124", "name": "computer"}, "tools[0].type"),
    ],
)
def test_others_are_refused_by_name(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(tool)
    assert refused.value.param == param
