"""Tools in the input, the client's search for tools, and messages between agents, as Codex sends them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import BadRequest
from tests.gateway.endpoints.responses.test_custom_tools import dropping, with_policy
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
from tests.openai_spec import Validate

SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
EXEC = {"type": "custom", "name": "exec", "description": "Runs code."}
OWN = {"type": "namespace", "name": "functions", "description": "", "tools": [EXEC, {**TOOL, "name": "wait"}]}
CLOCK = {"type": "namespace", "name": "clock", "description": "Time.", "tools": [{**TOOL, "name": "sleep"}]}
LITE = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [OWN, CLOCK, {"type": "web_search"}]}
HI = {"role": "user", "content": "hi"}


def call_of(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [call]}


def names_of(chat: Any) -> list[str]:
    return [tool["function"]["name"] for tool in chat["tools"]]


def test_tools_of_the_input_are_offered_and_those_of_the_clients_own_namespace_have_bare_names() -> None:
    translator, parsed = with_policy(dropping(web_search="drop"), input=[LITE, HI])
    chat = {name: json.loads(bytes(value)) for name, value in parsed.fields.items()}
    assert names_of(chat) == ["exec", "wait", "clock__sleep"]
    assert chat["messages"] == [HI]
    assert translator.headers({}) == {"x-warmpath-dropped-tools": "web_search"}


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("exec", {"type": "custom_tool_call", "name": "exec", "input": "1+1"}),
        ("wait", {"type": "function_call", "name": "wait"}),
        ("clock__sleep", {"type": "function_call", "name": "sleep", "namespace": "clock"}),
    ],
)
def test_calls_of_loaded_tools_have_the_clients_names(called: str, expected: Any) -> None:
    tools = {**LITE, "tools": [OWN, CLOCK]}
    (item,) = answered(call_of(called, '{"input": "1+1"}'), "tool_calls", input=[tools, HI])["output"]
    assert expected.items() <= item.items()
    assert ("namespace" in item) == ("namespace" in expected)
    turn = messages_of(tools, HI, item)[-1]
    assert turn["tool_calls"][0]["function"]["name"] == called


def test_a_search_for_tools_goes_round_and_its_tools_can_be_called(validate: Validate) -> None:
    assert names_of(chat_of(tools=[SEARCH])) == ["tool_search"]
    response = answered(call_of("tool_search", '{"query": "time"}'), "tool_calls", tools=[SEARCH])
    check_response(validate, response)
    (item,) = response["output"]
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "time"})
    found = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "status": "completed"}
    deferred = {**TOOL, "name": "now", "defer_loading": True}
    output = {**found, "tools": [CLOCK, deferred]}
    chat = chat_of([HI, item, output, item, {**output, "tools": [deferred]}], tools=[SEARCH])
    assert names_of(chat) == ["tool_search", "clock__sleep", "now"]  # a tool that is found twice is offered once
    _, turn, result, _, _ = chat["messages"]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"query": "time"}
    assert result == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "These tools are available now: clock.sleep, now.",
    }


@pytest.mark.parametrize("hosted", [{}, {"name": 5}, {"tools": 6}], ids=str)
def test_a_found_tool_that_is_dropped_is_not_named_to_the_model(hosted: Any) -> None:
    tools = [TOOL, {"type": "web_search", **hosted}]
    output = {"type": "tool_search_output", "call_id": "c1", "tools": tools}
    _, parsed = with_policy(dropping(web_search="drop"), input=[HI, output])
    result = json.loads(bytes(parsed.fields["messages"]))[-1]
    assert result["content"] == "These tools are available now: look."


def test_a_streamed_search(validate: Validate) -> None:
    translator, _ = read(tools=[SEARCH], stream=True)
    call = {"index": 0, **call_of("tool_search", '{"que')["tool_calls"][0]}
    more = {"index": 0, "function": {"arguments": 'ry": "time"}'}}
    chunks = [frame({"tool_calls": [call]}), frame({"tool_calls": [more]}), frame({}, finish_reason="tool_calls")]
    stream = b"".join(translator.frames(chunk, last=False) for chunk in chunks)
    events = events_of(stream + translator.frames(usage_frame() + DONE, last=True))
    check_events(validate, events)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["arguments"]) for item in items] == [("tool_search_call", {"query": "time"})]


@pytest.mark.parametrize("arguments", ["[", "time"])
def test_a_search_with_other_arguments_is_a_query(arguments: str) -> None:
    (item,) = answered(call_of("tool_search", arguments), "tool_calls", tools=[SEARCH])["output"]
    assert item["arguments"] == {"query": arguments}


def test_a_search_by_the_server_is_dropped_because_deferred_tools_are_offered() -> None:
    deferred = {**TOOL, "defer_loading": True}
    translator, parsed = with_policy(dropping(), tools=[{"type": "tool_search"}, deferred])
    assert [tool["function"]["name"] for tool in json.loads(bytes(parsed.fields["tools"]))] == ["look"]
    assert translator.headers({}) == {"x-warmpath-dropped-tools": "tool_search"}


def test_invalid_loaded_tools_are_rejected_by_name() -> None:
    with pytest.raises(BadRequest) as caught:
        chat_of([HI, {**LITE, "tools": [{"type": "function", "name": 5}]}])
    assert caught.value.param == "input[1].tools[0].name"
    with pytest.raises(BadRequest) as caught:
        chat_of([LITE])
    assert caught.value.param == "input[0].tools[2].type"


def test_a_message_between_agents() -> None:
    text = {"type": "encrypted_content", "encrypted_content": "Find it."}
    given = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": [text]}
    (message,) = messages_of(given)
    assert message["role"] == "user"
    assert [part["text"] for part in message["content"]] == ["Message from /root to /root/a:", "Find it."]
    with pytest.raises(BadRequest, match="encrypted by OpenAI"):
        messages_of({**given, "content": [{**text, "encrypted_content": "gAAAAABo"}]})


def test_metadata_that_codexs_own_provider_adds_to_items_is_accepted() -> None:
    metadata = {"internal_chat_message_metadata_passthrough": {"turn_id": "t"}}
    tools = {**LITE, "tools": [OWN]}
    assert messages_of({**tools, **metadata}, {**HI, **metadata}) == [HI]
    with pytest.raises(BadRequest, match="metadata"):
        messages_of({**HI, "metadata": {}})
