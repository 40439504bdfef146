"""Request bodies, translated to chat or rejected by field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.endpoints.responses.body import ResponsesBody, client_field
from gateway.prompts.reader import read_fields
from tests.gateway.endpoints.responses.translated import TOOL, chat_of, read, whole_answer

LEAST = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
FORMAT = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {}),
        ({"instructions": None, "tools": None, "text": None, "reasoning": None, "stream": None}, {}),
        (
            {"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9},
            {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9},
        ),
        ({"metadata": {"a": "b"}, "user": "u"}, {"metadata": {"a": "b"}, "user": "u"}),
        ({"safety_identifier": "s", "service_tier": "flex"}, {"safety_identifier": "s", "service_tier": "flex"}),
        (
            {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
            {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        ),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"text": {"verbosity": "low"}}, {"verbosity": "low"}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {**FORMAT, "strict": True, "description": "d"}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True, "description": "d"},
                }
            },
        ),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"top_logprobs": 0}, {}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        (
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            {"stream": True, "stream_options": {"include_usage": True}},
        ),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
        # Values that cannot change the answer.
        ({"store": True, "background": False, "truncation": "disabled", "previous_response_id": None}, {}),
        ({"max_tool_calls": 3, "client_metadata": {"installation": "x"}}, {}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
    ],
)
def test_every_field_is_translated_to_chat(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    assert chat_of(**fields) == {**LEAST, **chat}


def test_a_request_as_a_coding_agent_sends_it() -> None:
    """As Codex sends it, with web search disabled."""
    namespace = {"type": "namespace", "name": "agents", "description": "For agents.", "tools": [TOOL]}
    items = [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be exact."}],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ]
    chat = chat_of(
        items, tools=[TOOL, namespace], tool_choice="auto", parallel_tool_calls=True, reasoning={"summary": "auto"},
        store=False, stream=True, include=["reasoning.encrypted_content"], prompt_cache_key="s",
        client_metadata={"session_id": "s", "turn_id": "t"},
    )  # fmt: skip
    assert chat.pop("messages") == [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "hello"}]
    assert [tool["function"]["name"] for tool in chat.pop("tools")] == ["look", "agents__look"]
    assert chat == {
        "model": "m", "tool_choice": "auto", "parallel_tool_calls": True, "prompt_cache_key": "s", "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_instructions_come_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert chat_of(instructions="Be brief.")["messages"] == [system, {"role": "user", "content": "hello"}]


def test_the_parsed_body_is_that_of_the_chat() -> None:
    _, parsed = read(temperature=0, max_output_tokens=9, stream=True, tools=[TOOL], user="u")
    assert parsed.deterministic and parsed.max_output_tokens == 9 and parsed.tools == 1
    assert parsed.common.stream and parsed.common.user == "u"
    assert parsed.common.stream_options is not None and parsed.common.stream_options.include_usage
    assert not read()[1].deterministic


def test_a_body_may_be_read_twice() -> None:
    translator, _ = read("first", instructions="x")
    body = b'{"model":"m","input":"second"}'
    again = translator.read(read_fields(body), body)
    assert bytes(again.fields["messages"]) == b'[{"role":"user","content":"second"}]'
    assert json.loads(translator.answer(whole_answer({"content": "y"})))["instructions"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"seed": 1}, "seed"),
        ({"messages": []}, "messages"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"model": None}, "model"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"style": "x"}}, "text.style"),
        ({"text": "x"}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "json_schema": {}}}}, "text.format.json_schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"user": "x" * 513}, "user"),
    ],
)
def test_unsupported_values_are_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as rejection:
        read(**fields)
    assert rejection.value.param == param
    assert rejection.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("chat_name", "client_name"),
    [
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("reasoning_effort", "reasoning.effort"),
        ("verbosity", "text.verbosity"),
        ("messages[3].content", "input"),
        ("tools[1].function.parameters", "tools[1].parameters"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("temperature", "temperature"),
    ],
)
def test_a_rejected_field_has_the_clients_name(chat_name: str, client_name: str) -> None:
    assert client_field(chat_name) == client_name


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
kinds = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "item_reference", "input_text", "output_text",
     "refusal", "input_image", "input_file", "function", "namespace", "allowed_tools", "json_schema", "text"]
)  # fmt: skip
inner_names = st.sampled_from(
    ["role", "content", "call_id", "name", "arguments", "output", "summary", "encrypted_content", "text", "refusal",
     "image_url", "file_data", "tools", "mode", "schema", "strict", "format", "verbosity", "effort", "namespace"]
)  # fmt: skip
objects = st.recursive(
    st.dictionaries(inner_names, values, max_size=4),
    lambda inner: st.fixed_dictionaries(
        {"type": kinds | values},
        optional={"content": st.lists(inner, max_size=2), "tools": st.lists(inner, max_size=2), "role": st.just("user"),
                  "name": st.just("look"), "call_id": st.just("c"), "arguments": st.just("{}"), "format": inner},
    ),
    max_leaves=5,
)  # fmt: skip


@given(
    st.lists(objects | values, max_size=3) | values,
    st.dictionaries(
        st.sampled_from(ResponsesBody.__struct_fields__), objects | st.lists(objects, max_size=2) | values, max_size=4
    ),
)
def test_any_json_is_read_or_rejected_by_a_name(items: Any, fields: dict[str, Any]) -> None:
    try:
        chat_of(**{"input": items, **fields})
    except BadRequest as rejection:
        assert rejection.status == 400 and rejection.param
        msgspec.json.encode(rejection.body())
