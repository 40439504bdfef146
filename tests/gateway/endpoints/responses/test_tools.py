"""Tools and tool choices."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.errors import BadRequest
from tests.gateway.endpoints.responses.translated import TOOL, answered, chat_of, check_response, messages_of, read
from tests.openai_spec import Validate

OTHER = {"type": "function", "name": "other", "description": "d", "strict": True, "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT_OTHER = {
    "type": "function",
    "function": {"name": "other", "description": "d", "parameters": {"type": "object"}, "strict": True},
}


def named(name: str) -> dict[str, str]:
    return {"type": "function", "name": name}


def allowed(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize(
    ("choice", "tools", "chat_choice"),
    [
        (None, [CHAT_TOOL, CHAT_OTHER], None),
        ("auto", [CHAT_TOOL, CHAT_OTHER], "auto"),
        ("none", [CHAT_TOOL, CHAT_OTHER], "none"),
        ("required", [CHAT_TOOL, CHAT_OTHER], "required"),
        (named("other"), [CHAT_TOOL, CHAT_OTHER], {"type": "function", "function": {"name": "other"}}),
        (allowed(named("other")), [CHAT_OTHER], "auto"),
        (allowed(named("look"), mode="required"), [CHAT_TOOL], "required"),
    ],
)
def test_a_tool_choice_is_translated_to_chat(choice: Any, tools: list[Any], chat_choice: Any) -> None:
    chat = chat_of(tools=[TOOL, OTHER], tool_choice=choice, parallel_tool_calls=False)
    assert chat["tools"] == tools and chat.get("tool_choice") == chat_choice
    assert chat["parallel_tool_calls"] is False


def test_a_response_repeats_all_tools_and_the_choice() -> None:
    response = answered({"content": "x"}, tools=[TOOL, OTHER], tool_choice=allowed(named("other")))
    assert response["tools"] == [{**TOOL, "description": None}, OTHER]
    assert response["tool_choice"] == allowed(named("other"))


AGENTS = {"type": "namespace", "name": "agents", "description": "For agents.", "tools": [TOOL, OTHER]}


def test_functions_of_a_namespace_have_both_names_in_chat(validate: Validate) -> None:
    functions = [tool["function"] for tool in chat_of(tools=[TOOL, AGENTS], tool_choice=named("agents__look"))["tools"]]
    assert [function["name"] for function in functions] == ["look", "agents__look", "agents__other"]
    assert [function.get("description") for function in functions] == [None, "For agents.", "d"]
    call = {"id": "c1", "type": "function", "function": {"name": "agents__look", "arguments": "{}"}}
    response = answered({"tool_calls": [call]}, "tool_calls", tools=[TOOL, AGENTS])
    check_response(validate, response)
    assert response["tools"][1] == AGENTS
    (item,) = response["output"]
    assert (item["name"], item["namespace"]) == ("look", "agents")
    assert messages_of(item)[0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "x"}, {**TOOL, "name": "x"}]}, "tools[1].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].function"),
        ({"tools": [{**TOOL, "output_schema": {}}]}, "tools[0].output_schema"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**AGENTS, "tools": [TOOL, {"type": "mcp", "name": "x"}]}]}, "tools[0].tools[1].type"),
        ({"tools": [{**AGENTS, "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0].tools"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": ["auto"]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("other")}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": allowed(named("other"))}, "tool_choice.tools[0].name"),
        ({"tools": [TOOL], "tool_choice": allowed({"type": "mcp"})}, "tool_choice.tools[0].type"),
        ({"tools": [TOOL], "tool_choice": allowed()}, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": allowed(named("look"), mode="never")}, "tool_choice.mode"),
    ],
)
def test_unsupported_tools_are_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as rejection:
        read(**fields)
    assert rejection.value.param == param
