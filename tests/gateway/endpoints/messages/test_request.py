"""Requests of Anthropic's wire, translated to chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.endpoints.chat import read_chat
from gateway.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from gateway.prompts.reader import read_fields

HELLO = {"role": "user", "content": "hello"}
WEATHER = {"name": "weather", "description": "in a city", "input_schema": {"type": "object", "properties": {}}}


def chat_of(**fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": [HELLO], **fields}).encode()
    read = MessagesEndpoint().read(read_fields(body), body)
    return {name: json.loads(bytes(value)) for name, value in read.fields.items()}


def messages_of(*messages: Any, **fields: Any) -> list[Any]:
    chat: list[Any] = chat_of(messages=list(messages), **fields)["messages"]
    return chat


def test_a_minimal_request() -> None:
    assert chat_of() == {"model": "m", "max_tokens": 9, "messages": [HELLO]}


def test_every_parameter_is_translated() -> None:
    assert chat_of(
        system="be brief",
        stop_sequences=["END"],
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        metadata={"user_id": "u-1"},
        service_tier="standard_only",
        tools=[{**WEATHER, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        cache_control={"type": "ephemeral", "ttl": "1h"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        speed="standard",
    ) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, HELLO],
        "max_tokens": 9,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "user": "u-1",
        "service_tier": "default",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "in a city",
                    "parameters": {"type": "object", "properties": {}},
                    "strict": True,
                },
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }


def test_null_counts_as_absent() -> None:
    nothing = (
        "system", "stop_sequences", "stream", "temperature", "top_p", "top_k", "metadata", "service_tier", "tools",
        "tool_choice", "thinking", "output_config", "cache_control", "context_management", "speed",
    )  # fmt: skip
    assert chat_of(**dict.fromkeys(nothing)) == chat_of()
    assert chat_of(tools=[], stop_sequences=[], system=[], metadata={}, output_config={}) == chat_of()


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ],
)
def test_tool_choices(choice: dict[str, Any], chat: dict[str, Any]) -> None:
    fields = chat_of(tools=[WEATHER], tool_choice=choice)
    assert {name: fields[name] for name in ("tool_choice", "parallel_tool_calls") if name in fields} == chat


@pytest.mark.parametrize(
    ("thinking", "chat"),
    [
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True, "thinking": True}),
        ({"type": "adaptive", "display": "summarized"}, None),  # the model's own default
    ],
)
def test_thinking_options(thinking: dict[str, Any], chat: dict[str, Any] | None) -> None:
    assert chat_of(thinking=thinking).get("chat_template_kwargs") == chat


def test_texts_and_images() -> None:
    text = {"type": "text", "text": "look"}
    assert messages_of({"role": "user", "content": [{**text, "cache_control": {"type": "ephemeral"}}]}) == [
        {"role": "user", "content": "look"}
    ]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    there = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    assert messages_of({"role": "user", "content": [text, image, there]}) == [
        {
            "role": "user",
            "content": [
                text,
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
                {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            ],
        }
    ]


def test_documents() -> None:
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "all of it"}}
    file = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    titled = [{**text, "title": "notes"}, {**file, "title": "a.pdf", "citations": {"enabled": False}}]
    assert messages_of({"role": "user", "content": [text, file, *titled]})[0]["content"] == [
        {"type": "text", "text": "all of it"},
        {"type": "file", "file": {"filename": "document", "file_data": "data:application/pdf;base64,JVBE"}},
        {"type": "text", "text": "notes\n\nall of it"},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}},
    ]


def test_the_context_of_a_document_is_text_before_it() -> None:
    data = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    file = {"type": "document", "source": data, "title": "a.pdf", "context": "from 2024"}
    plain = {**file, "source": {"type": "text", "media_type": "text/plain", "data": "all of it"}}
    parts = {**file, "source": {"type": "content", "content": "all of it"}}
    url = {**file, "source": {"type": "url", "url": "https://example.org/a.pdf"}}
    assert messages_of({"role": "user", "content": [file, plain, parts, url]})[0]["content"] == [
        {"type": "text", "text": "from 2024"},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}},
        {"type": "text", "text": "a.pdf\n\nfrom 2024\n\nall of it"},
        *({"type": "text", "text": text} for text in ("a.pdf", "from 2024", "all of it")),
        {"type": "text", "text": "from 2024"},
        {"type": "file", "file": {"filename": "a.pdf", "file_url": "https://example.org/a.pdf"}},
    ]


def test_system_prompts_in_any_form_and_position() -> None:
    block = {"type": "text", "text": "be brief"}
    assert messages_of(HELLO, system=[block])[0] == {"role": "system", "content": "be brief"}
    assert messages_of(HELLO, system=[block, block])[0] == {"role": "system", "content": [block, block]}
    later = {"role": "system", "content": "now in French"}
    assert messages_of(HELLO, later, HELLO, system="be brief")[1:] == [HELLO, later, HELLO]


def test_tool_calls_and_results() -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Zürich"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "What is the weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look.", "signature": ""},
                {"type": "redacted_thinking", "data": "c2VjcmV0"},
                {"type": "text", "text": "Let me look."},
                call,
                {**call, "id": "call_2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And in French, please."},
                {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_2",
                    "content": [{"type": "text", "text": "no such city"}, image],
                    "is_error": True,
                },
            ],
        },
    ]
    assert messages_of(*turns) == [
        {"role": "user", "content": "What is the weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "I must look.",
            "thinking_blocks": [{"type": "redacted_thinking", "data": "c2VjcmV0"}],
            "tool_calls": [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Z\\u00fcrich"}'},  # byte for byte
                }
                for name in ("call_1", "call_2")
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {
            "role": "tool",
            "tool_call_id": "call_2",
            "content": [
                {"type": "text", "text": "Error: no such city"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
            ],
        },
        {"role": "user", "content": "And in French, please."},
    ]


def test_signed_thinking_is_sent_back_unchanged() -> None:
    thinking = {"type": "thinking", "thinking": "Look.", "signature": "s"}
    (_, message) = messages_of(HELLO, {"role": "assistant", "content": [thinking, {"type": "text", "text": "x"}]})
    assert (message["reasoning_content"], message["thinking_blocks"]) == ("Look.", [thinking])
    (_, message) = messages_of(HELLO, {"role": "assistant", "content": [{**thinking, "signature": ""}]})
    assert (message["reasoning_content"], message["content"]) == ("Look.", "")
    assert "thinking_blocks" not in message


def test_failed_and_empty_tool_results() -> None:
    call: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": {}}]}
    failed = {"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True}
    done = {"type": "tool_result", "tool_use_id": "c"}
    assert messages_of(HELLO, call, {"role": "user", "content": [failed]})[1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "n", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "Error: no"},
    ]
    assert messages_of(HELLO, call, {"role": "user", "content": [done]})[-1]["content"] == ""


def test_consecutive_turns_of_one_role_are_joined() -> None:
    """As Anthropic does; many chat templates reject them otherwise."""
    assert messages_of(HELLO, {"role": "user", "content": "again"}) == [
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "again"}]}
    ]


def test_a_trailing_assistant_turn_is_continued() -> None:
    prefill = {"role": "assistant", "content": "The answer is ("}
    fields = chat_of(messages=[HELLO, prefill])
    assert fields["messages"] == [HELLO, prefill]
    assert (fields["add_generation_prompt"], fields["continue_final_message"]) == (False, True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "messages[0].content[0].type"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}
                ]
            },
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "x"}]}]},
            "messages[1].content[0].type",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": [1]}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1].type"),
        ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0]"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0]"),
        ({"tools": [{"name": "weather"}]}, "tools[0]"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"metadata": {"team": "x"}}, "metadata"),
        ({"output_config": {"effort": "utmost"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest) as rejection:
        chat_of(**fields)
    assert named in rejection.value.message
    assert (rejection.value.param or "").startswith(named.partition("[")[0].partition(".")[0])


def test_a_prompt_has_the_same_pieces_as_in_chat() -> None:
    """Routing uses the pieces."""
    turns = [HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    body = json.dumps({"model": "m", "max_tokens": 9, "system": "s", "messages": turns, "tools": [WEATHER]}).encode()
    function = {"name": "weather", "description": "in a city", "parameters": WEATHER["input_schema"]}
    messages = [{"role": "system", "content": "s"}, *turns]
    chat = json.dumps({"model": "m", "messages": messages, "tools": [{"type": "function", "function": function}]})
    by_messages, by_chat = (
        MessagesEndpoint().read(read_fields(body), body),
        read_chat(read_fields(chat.encode()), chat.encode()),
    )
    assert by_messages.pieces[1:] == by_chat.pieces[1:] and len(by_messages.pieces) == len(by_chat.pieces)
    tools = [body.pieces[0] for body in (by_messages, by_chat)]
    assert isinstance(tools[0], bytes) and isinstance(tools[1], bytes)
    assert json.loads(tools[0]) == json.loads(tools[1])


def test_count_tokens_rejects_max_tokens() -> None:
    body = json.dumps({"model": "m", "messages": [HELLO], "system": "s", "tools": [WEATHER]}).encode()
    read = CountTokensEndpoint().read({}, body)
    assert set(read.fields) == {"model", "messages", "tools"} and read.max_output_tokens is None
    with pytest.raises(BadRequest, match="max_tokens"):
        CountTokensEndpoint().read({}, json.dumps({"model": "m", "messages": [HELLO], "max_tokens": 1}).encode())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    ["model", "system", "max_tokens", "tools", "tool_choice", "thinking", "metadata", "stop_sequences", "output_config"]
)
kinds = st.sampled_from(["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "other"])
keys = st.sampled_from(["text", "source", "id", "name", "input", "tool_use_id", "content", "thinking", "data"])
blocks = st.builds(lambda kind, rest: {"type": kind, **rest}, kinds, st.dictionaries(keys, values, max_size=4))
roles = st.sampled_from(["user", "assistant", "system", "tool"])
turns = st.fixed_dictionaries({"role": roles, "content": values | st.lists(blocks, max_size=3)})


@given(st.dictionaries(names, values), st.lists(turns, max_size=3))
def test_any_json_is_read_or_refused(fields: dict[str, Any], messages: list[Any]) -> None:
    try:
        chat_of(**fields, messages=messages)
    except BadRequest as rejection:
        assert rejection.message
