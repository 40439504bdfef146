"""Input items, translated to chat messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.core.errors import BadRequest
from gateway.endpoints.responses import ResponsesEndpoint
from gateway.endpoints.responses.reasoning import ReasoningContent, encode_reasoning
from tests.gateway.calls import a_call
from tests.gateway.endpoints.responses.translated import TOOL, answered, messages_of, read

REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
MESSAGE = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
}


def call(number: int = 1) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}", "status": "completed"}


def output(number: int = 1, content: Any = "found") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": content}


def tool_call(number: int = 1) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def tool_message(number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": "found"}


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_a_message_keeps_its_role(role: str) -> None:
    assert messages_of({"role": role, "content": "x"}) == [{"role": role, "content": "x"}]
    typed = {"type": "message", "role": role, "content": [{"type": "input_text", "text": "x"}]}
    assert messages_of(typed) == [{"role": role, "content": "x"}]


def test_leading_system_and_developer_messages_are_joined() -> None:
    first, later = {"role": "developer", "content": "One."}, {"role": "developer", "content": "Later."}
    user = {"role": "user", "content": "x"}
    systems = [{"role": "system", "content": text} for text in ("Zero.\n\nOne.\n\nLater.", "Later.")]
    assert messages_of(first, later, user, later, instructions="Zero.") == [systems[0], user, systems[1]]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    (system,) = messages_of({"role": "developer", "content": parts}, instructions="Zero.")
    assert [part["text"] for part in system["content"]] == ["Zero.", "a", "b"]


def test_content_parts_are_translated_to_chat() -> None:
    parts = [
        {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
        {"type": "input_image", "image_url": "https://x/y.png", "file_id": None},
        {"type": "input_file", "file_data": "data:text/plain;base64,AA", "filename": "f.txt"},
    ]
    assert messages_of({"role": "user", "content": parts}) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                {"type": "file", "file": {"filename": "f.txt", "file_data": "data:text/plain;base64,AA"}},
            ],
        }
    ]
    assert messages_of({"role": "user", "content": []}) == [{"role": "user", "content": ""}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages_of(refused) == [{"role": "assistant", "content": "No."}]
    assert messages_of(call(), output(content=[{"type": "input_text", "text": "found"}]))[1] == tool_message()


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [REASONING, MESSAGE, call(1), call(2), output(1), output(2)],
            [
                {
                    "role": "assistant",
                    "content": "Let me look.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [tool_call(1), tool_call(2)],
                },
                tool_message(1),
                tool_message(2),
            ],
        ),
        ([call(), output()], [{"role": "assistant", "content": None, "tool_calls": [tool_call()]}, tool_message()]),
        (  # between two calls
            [call(1), REASONING, call(2)],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Hm.",
                    "tool_calls": [tool_call(1), tool_call(2)],
                }
            ],
        ),
        ([call(), MESSAGE], [{"role": "assistant", "content": "Let me look.", "tool_calls": [tool_call()]}]),
        ([REASONING], [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]),
        ([REASONING, REASONING], [{"role": "assistant", "content": "", "reasoning_content": "Hm.\nHm."}]),
        (  # two turns
            [MESSAGE, REASONING, MESSAGE],
            [
                {"role": "assistant", "content": "Let me look."},
                {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm."},
            ],
        ),
        ([MESSAGE, MESSAGE], [{"role": "assistant", "content": "Let me look."}] * 2),
        ([{"type": "reasoning", "id": "x", "summary": []}, {"role": "user", "content": "x"}],
         [{"role": "user", "content": "x"}]),
    ],
)  # fmt: skip
def test_the_items_of_a_turn_become_one_message(items: list[Any], messages: list[Any]) -> None:
    assert messages_of(*items) == messages


def test_reasoning_is_read_from_whatever_the_client_has() -> None:
    summary = [{"type": "summary_text", "text": "Short."}]
    assert messages_of({"type": "reasoning", "summary": summary})[0]["reasoning_content"] == "Short."
    encoded = encode_reasoning(ReasoningContent("Grübelt."))
    item = {"type": "reasoning", "id": "rs", "summary": summary, "encrypted_content": encoded}
    assert messages_of(item)[0]["reasoning_content"] == "Grübelt."
    both = {**REASONING, "encrypted_content": "made by another vendor"}
    assert messages_of(both)[0]["reasoning_content"] == "Hm."


def test_signed_thinking_is_restored_from_encrypted_content() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc="},
        {"type": "redacted_thinking", "data": "xyz="},
    ]
    message = {"content": None, "reasoning_content": "Hm.", "thinking_blocks": blocks, "tool_calls": [tool_call()]}
    reasoning, call = answered(message, "tool_calls", include=["reasoning.encrypted_content"])["output"]
    for known in (reasoning, {**reasoning, "content": []}):
        assert messages_of(known, call) == [{"role": "assistant", **message}]
    del reasoning["encrypted_content"]
    assert (
        "thinking_blocks" not in messages_of(reasoning, call)[0]
    )  # a client that did not ask for it cannot send it back


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
def test_an_answers_items_can_be_sent_back(include: list[str]) -> None:
    message = {"content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [tool_call()]}
    items = answered(message, "tool_calls", include=include)["output"]
    assert messages_of(*items) == [{"role": "assistant", **message}]
    if include:
        items[0]["content"] = []
        assert messages_of(*items) == [{"role": "assistant", **message}]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("text", "input[1]"),
        ({"type": 5}, "input[1].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[1].type"),
        ({"type": "computer_call_output"}, "input[1].type"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "n"}, "input[1].input"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 5}, "input[1].content"),
        ({"role": "user", "content": "x", "caller": "y"}, "input[1].caller"),
        ({"role": "user", "content": [5]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "output_text", "text": "x"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[1].content[0].input_audio"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[1].content[0].file_id"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[1].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[1].content[0].file_id"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[1].content[0].file_data"),
        ({"type": "function_call", "name": "x", "arguments": "{}"}, "input[1].call_id"),
        ({"type": "function_call", "call_id": "c", "name": "x", "arguments": {}}, "input[1].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id"),
        ({"type": "reasoning", "encrypted_content": "gAAAAA"}, "input[1].encrypted_content"),
        ({"type": "reasoning", "encrypted_content": "wp1.?"}, "input[1].encrypted_content"),
        ({"type": "reasoning", "content": [{"type": "reasoning_text"}]}, "input[1].content[0].text"),
    ],
)
def test_an_unsupported_item_is_rejected_by_its_path(item: Any, param: str) -> None:
    with pytest.raises(BadRequest) as rejection:
        read([{"role": "user", "content": "x"}, item])
    assert rejection.value.param == param


def test_an_item_without_type_and_role_is_rejected() -> None:
    with pytest.raises(BadRequest) as rejection:
        read([{"id": "msg_1"}])
    assert rejection.value.param == "input[0].role"


def test_equal_prompts_of_both_endpoints_have_equal_fingerprints() -> None:
    """For JSON without spaces, as OpenAI's SDKs write it."""
    long = "x" * 5000
    items = [{"role": "user", "content": long}, REASONING, call(), output()]
    function = {"name": "look", "parameters": {"type": "object"}}
    chat = {
        "model": "m",
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": long}]},
            {"role": "assistant", "content": None, "tool_calls": [tool_call()], "reasoning_content": "Hm."},
            tool_message(),
        ],
    }
    call_by_chat = a_call(msgspec.json.encode(chat))
    response = {"model": "m", "input": items, "instructions": "Be brief.", "tools": [TOOL]}
    call_by_responses = a_call(msgspec.json.encode(response), endpoint=ResponsesEndpoint())
    assert call_by_responses.fingerprint == call_by_chat.fingerprint and call_by_chat.fingerprint
    assert call_by_responses.prompt_tokens_estimate == call_by_chat.prompt_tokens_estimate
