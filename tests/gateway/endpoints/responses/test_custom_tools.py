"""Custom tools, hosted tools that the policy drops, and fields that current clients send by default."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import BadRequest
from gateway.endpoints.responses import ResponsesEndpoint, ResponsesTranslator
from gateway.policy import Policy
from gateway.policy.hosted_tools import action_for
from gateway.prompts.reader import ParsedBody, read_fields
from tests.gateway.endpoints.responses.translated import (
    DONE,
    TOOL,
    answered,
    chat_of,
    check_events,
    check_response,
    events_of,
    frame,
    messages_of,
    read,
    usage_frame,
)
from tests.gateway.harness import policy_of
from tests.openai_spec import Validate

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "apply_patch", "arguments": '{"input": "*** \\"x\\"\\n"}'}}
TEXT = '*** "x"\n'


def test_a_custom_tool_is_a_function_with_its_grammar_in_the_description() -> None:
    (tool,) = chat_of(tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"})["tools"]
    function = tool["function"]
    assert function["name"] == "apply_patch" and function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Edit files.") and "lark grammar:\nstart: /x+/" in function["description"]


def test_a_call_of_a_custom_tool_and_its_result_go_round(validate: Validate) -> None:
    response = answered({"tool_calls": [CALL]}, "tool_calls", tools=[PATCH])
    check_response(validate, response)
    (item,) = response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", TEXT)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    turn, result = messages_of(item, output, tools=[PATCH])
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": TEXT}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c1", "done")


def test_a_streamed_call_of_a_custom_tool(validate: Validate) -> None:
    translator, _ = read(tools=[PATCH], stream=True)
    first, second = CALL["function"]["arguments"][:9], CALL["function"]["arguments"][9:]  # type: ignore[index]
    call = {**CALL, "index": 0, "function": {"name": "apply_patch", "arguments": first}}
    more = {"index": 0, "function": {"arguments": second}}
    chunks = [frame({"tool_calls": [call]}), frame({"tool_calls": [more]}), frame({}, finish_reason="tool_calls")]
    stream = b"".join(translator.frames(chunk, last=False) for chunk in chunks)
    events = events_of(stream + translator.frames(usage_frame() + DONE, last=True))
    check_events(validate, events)
    kinds = [event["type"] for event in events]
    assert kinds.count("response.custom_tool_call_input.delta") == 1
    (done,) = (event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == TEXT and events[-1]["response"]["output"][0]["input"] == TEXT


@pytest.mark.parametrize("arguments", ["not json", "[1]", '{"other": 1}', '{"input": 5}'])
def test_arguments_in_another_form_are_the_input(arguments: str) -> None:
    call = {**CALL, "function": {"name": "apply_patch", "arguments": arguments}}
    (item,) = answered({"tool_calls": [call]}, "tool_calls", tools=[PATCH])["output"]
    assert item["input"] == arguments


def dropping(**hosted: str) -> Policy:
    return Policy.model_validate(policy_of(hosted_tools=hosted))


def with_policy(policy: Policy, **fields: Any) -> tuple[ResponsesTranslator, ParsedBody]:
    translator = ResponsesEndpoint().translator("req_abc")
    translator.use_policy(policy)
    body = json.dumps({"model": "m", "input": "x", **fields}).encode()
    return translator, translator.read(read_fields(body), body)


def test_hosted_tools_are_dropped_by_policy_and_named_in_the_reply() -> None:
    tools = [TOOL, {"type": "web_search", "external_web_access": False}, {"type": "web_search_preview"}]
    translator, parsed = with_policy(dropping(web_search="drop"), tools=tools)
    assert [tool["function"]["name"] for tool in json.loads(bytes(parsed.fields["tools"]))] == ["look"]
    assert translator.headers({}) == {"x-warmpath-dropped-tools": "web_search,web_search_preview"}
    for policy in (dropping(), dropping(web_search="drop", web_search_preview="refuse")):
        with pytest.raises(BadRequest, match="web_search"):
            with_policy(policy, tools=tools)
    with pytest.raises(BadRequest, match="mcp"):
        with_policy(dropping(web_search="drop"), tools=[{"type": "mcp"}])


def test_without_tools_that_are_left_none_are_sent() -> None:
    _, parsed = with_policy(dropping(web_search="drop"), tools=[{"type": "web_search"}], tool_choice="auto")
    assert "tools" not in parsed.fields and "tool_choice" not in parsed.fields


def test_the_longest_name_decides() -> None:
    assert action_for({"web_search": "drop", "web_search_preview": "refuse"}, "web_search_preview_2025") == "refuse"
    assert action_for({"web_search": "drop"}, "web_searcher") == "refuse"


def test_fields_that_clients_send_by_default_are_accepted() -> None:
    chat = chat_of(reasoning={"effort": "low", "context": "auto"}, include=["web_search_call.action.sources"])
    assert chat["reasoning_effort"] == "low"
